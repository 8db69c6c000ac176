/* The test double's MIG: mode, GPU instances, compute instances, MIG devices. See double.h. */
#include "double.h"

/* ---- MIG mode ---- */

API int nvmlDeviceGetMigMode(void *device, u32 *current, u32 *pending) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  if (!model(gpu)->shapes) END(NOT_SUPPORTED);
  *current = S.gpu[gpu].mode;
  *pending = S.gpu[gpu].pending;
  END(OK);
}
API int nvmlDeviceSetMigMode(void *device, u32 mode, u32 *status) {
  u32 gpu;
  BEGIN(1);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  Gpu *g = &S.gpu[gpu];
  if (!model(gpu)->shapes) END(NOT_SUPPORTED);
  if (mode > 1) END(INVALID_ARGUMENT);
  g->pending = mode;
  *status = OK;
  if (mode == g->mode) END(OK);
  if (g->needs_reset) *status = RESET_REQUIRED;
  else if (g->procs || taken(gpu)) *status = IN_USE;
  else {
    g->mode = mode;
    g->generation++;
  }
  END(OK);
}

/* ---- GPU instances ---- */

typedef struct {
  u32 version, id, p2p, slices, instances, sms, copy, decoders, encoders, jpeg, ofa;
  u64 memory_mb;
  char name[96];
} GiProfile;
_Static_assert(sizeof(GiProfile) == 0x98, "nvmlGpuInstanceProfileInfo_v2_t");
API int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, u32 which, GiProfile *out) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  if (out->version != 0x02000098) END(ARGUMENT_VERSION_MISMATCH);
  if (!model(gpu)->shapes) END(NOT_SUPPORTED);
  for (int i = 0; i < PROFILES; i++) {
    const Shape *s = &model(gpu)->shapes[i];
    if (!model(gpu)->names[i] || s->which != which) continue;
    *out = (GiProfile){0x02000098, s->id, 0, s->slices, s->most, model(gpu)->sms[i], s->slices, 0, 0, 0, 0,
                       memory_of(gpu, (u32)i) >> 20, ""};
    snprintf(out->name, sizeof out->name, "MIG %s", model(gpu)->names[i]);
    END(OK);
  }
  END(NOT_SUPPORTED);
}
typedef struct { u32 start, size; } Placement;
API int nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *device, u32 id, Placement *out, u32 *count) {
  u32 gpu, found = 0;
  BEGIN(0);
  PRIVILEGED;
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  int shape = shape_of(gpu, id);
  if (shape < 0) END(NOT_SUPPORTED);
  for (u32 start = 0; start < 8; start++)
    if (model(gpu)->shapes[shape].starts >> start & 1) {
      if (out) out[found] = (Placement){start, model(gpu)->shapes[shape].size};
      found++;
    }
  *count = found;
  END(OK);
}
API int nvmlDeviceGetGpuInstanceRemainingCapacity(void *device, u32 id, u32 *count) {
  u32 gpu;
  BEGIN(0);
  PRIVILEGED;
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  int shape = shape_of(gpu, id);
  if (shape < 0 || !S.gpu[gpu].mode) END(NOT_SUPPORTED);
  u32 used = taken(gpu), like = 0;
  *count = 0;
  for (u32 i = 0; i < GIS; i++) like += S.gpu[gpu].gi[i].used && S.gpu[gpu].gi[i].profile == (u32)shape;
  const Shape *s = &model(gpu)->shapes[shape];
  for (u32 start = 0; start < 8 && room(gpu, (u32)shape) && like + *count < s->most; start++)
    if (s->starts >> start & 1 && !(used & bits(start, s->size))) {
      used |= bits(start, s->size);
      ++*count;
    }
  END(OK);
}
static int create(u32 gpu, int shape, int wanted, void **handle) { /* wanted: a start, or -1 for any */
  if (!S.gpu[gpu].mode || shape < 0) return NOT_SUPPORTED;
  if (S.gpu[gpu].needs_reset) return RESET_REQUIRED;
  const Shape *s = &model(gpu)->shapes[shape];
  if (wanted >= 0 && !(wanted < 8 && s->starts >> wanted & 1)) return INVALID_ARGUMENT;
  if (!room(gpu, (u32)shape)) return INSUFFICIENT_RESOURCES;
  for (u32 start = 0; start < 8; start++) {
    if (!(s->starts >> start & 1) || taken(gpu) & bits(start, s->size)) continue;
    if (wanted >= 0 && (u32)wanted != start) continue;
    for (u32 i = 1; i < GIS; i++)
      if (!S.gpu[gpu].gi[i].used) {
        memset(&S.gpu[gpu].gi[i], 0, sizeof(Gi));
        S.gpu[gpu].gi[i].used = 1;
        S.gpu[gpu].gi[i].profile = (u32)shape;
        S.gpu[gpu].gi[i].start = start;
        S.gpu[gpu].gi[i].serial = ++S.serial;
        *handle = pack(GPU_INSTANCE, gpu, i, 0);
        return OK;
      }
  }
  return INSUFFICIENT_RESOURCES;
}
API int nvmlDeviceCreateGpuInstance(void *device, u32 id, void **handle) {
  u32 gpu;
  BEGIN(1);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  END(answer ? answer : create(gpu, shape_of(gpu, id), -1, handle));
}
API int nvmlDeviceCreateGpuInstanceWithPlacement(void *device, u32 id, const Placement *place, void **handle) {
  u32 gpu;
  BEGIN(1);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  int shape = shape_of(gpu, id);
  if (shape >= 0 && place->size != model(gpu)->shapes[shape].size) END(INVALID_ARGUMENT);
  END(create(gpu, shape, (int)place->start, handle));
}
API int nvmlGpuInstanceDestroy(void *instance) {
  u32 gpu, gi;
  BEGIN(1);
  int answer = unpack(instance, GPU_INSTANCE, &gpu, &gi, NULL);
  if (answer) END(answer);
  if (S.gpu[gpu].needs_reset) END(RESET_REQUIRED);
  for (u32 c = 0; c < CIS; c++)
    if (S.gpu[gpu].gi[gi].ci[c].used) END(IN_USE);
  S.gpu[gpu].gi[gi].used = 0;
  END(OK);
}
API int nvmlDeviceGetGpuInstances(void *device, u32 id, void **out, u32 *count) {
  u32 gpu;
  BEGIN(0);
  PRIVILEGED;
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  int shape = shape_of(gpu, id);
  if (shape < 0 || !S.gpu[gpu].mode) END(NOT_SUPPORTED);
  *count = 0;
  for (u32 i = 0; i < GIS; i++)
    if (S.gpu[gpu].gi[i].used && S.gpu[gpu].gi[i].profile == (u32)shape)
      out[(*count)++] = pack(GPU_INSTANCE, gpu, i, 0);
  END(OK);
}
API int nvmlDeviceGetGpuInstanceById(void *device, u32 id, void **out) {
  u32 gpu;
  BEGIN(0);
  PRIVILEGED;
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  if (!S.gpu[gpu].mode) END(NOT_SUPPORTED);
  if (id >= GIS || !S.gpu[gpu].gi[id].used) END(NOT_FOUND);
  *out = pack(GPU_INSTANCE, gpu, id, 0);
  END(OK);
}
typedef struct { void *device; u32 id, profile; Placement place; } GiInfo;
_Static_assert(sizeof(GiInfo) == 24, "nvmlGpuInstanceInfo_t");
API int nvmlGpuInstanceGetInfo(void *instance, GiInfo *out) {
  u32 gpu, gi;
  BEGIN(0);
  int answer = unpack(instance, GPU_INSTANCE, &gpu, &gi, NULL);
  if (answer) END(answer);
  const Shape *s = &model(gpu)->shapes[S.gpu[gpu].gi[gi].profile];
  *out = (GiInfo){pack(DEVICE, gpu, 0, 0), gi, s->id, {S.gpu[gpu].gi[gi].start, s->size}};
  END(OK);
}

/* ---- compute instances: a profile for each number of slices up to those of the GPU instance ---- */

typedef struct { u32 version, id, slices, instances, sms, copy, decoders, encoders, jpeg, ofa; char name[96]; } CiProfile;
_Static_assert(sizeof(CiProfile) == 0x88, "nvmlComputeInstanceProfileInfo_v2_t");
static const u32 ci_slices[] = {1, 2, 3, 4, 7, 8, 6, 1, 7}; /* by NVML_COMPUTE_INSTANCE_PROFILE_ */
static u32 ci_free(u32 gpu, u32 gi) {
  u32 left = model(gpu)->shapes[S.gpu[gpu].gi[gi].profile].slices;
  for (u32 c = 0; c < CIS; c++)
    if (S.gpu[gpu].gi[gi].ci[c].used) left -= S.gpu[gpu].gi[gi].ci[c].slices;
  return left;
}
API int nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, u32 which, u32 engine, CiProfile *out) {
  u32 gpu, gi;
  BEGIN(0);
  int answer = unpack(instance, GPU_INSTANCE, &gpu, &gi, NULL);
  if (answer) END(answer);
  if (out->version != 0x02000088) END(ARGUMENT_VERSION_MISMATCH);
  const Shape *s = &model(gpu)->shapes[S.gpu[gpu].gi[gi].profile];
  if (engine || which > 4 || ci_slices[which] > s->slices) END(NOT_SUPPORTED);
  *out = (CiProfile){0x02000088, which, ci_slices[which], s->slices / ci_slices[which], 0, 0, 0, 0, 0, 0, ""};
  snprintf(out->name, sizeof out->name, "MIG %uc.%s", ci_slices[which], model(gpu)->names[S.gpu[gpu].gi[gi].profile]);
  END(OK);
}
API int nvmlGpuInstanceCreateComputeInstance(void *instance, u32 id, void **handle) {
  u32 gpu, gi;
  BEGIN(1);
  int answer = unpack(instance, GPU_INSTANCE, &gpu, &gi, NULL);
  if (answer) END(answer);
  if (id > 4) END(NOT_SUPPORTED);
  if (ci_slices[id] > ci_free(gpu, gi)) END(INSUFFICIENT_RESOURCES);
  for (u32 c = 0; c < CIS; c++) {
    Ci *ci = &S.gpu[gpu].gi[gi].ci[c];
    if (ci->used) continue;
    *ci = (Ci){1, ci_slices[id], 0, ++S.serial};
    *handle = pack(COMPUTE_INSTANCE, gpu, gi, c);
    END(OK);
  }
  END(INSUFFICIENT_RESOURCES);
}
API int nvmlComputeInstanceDestroy(void *instance) {
  u32 gpu, gi, ci;
  BEGIN(1);
  int answer = unpack(instance, COMPUTE_INSTANCE, &gpu, &gi, &ci);
  if (answer) END(answer);
  for (u32 i = 0; i < S.gpu[gpu].procs; i++)
    if (S.gpu[gpu].proc[i].gi == gi && S.gpu[gpu].proc[i].ci == ci) END(IN_USE);
  S.gpu[gpu].gi[gi].ci[ci].used = 0;
  END(OK);
}
API int nvmlGpuInstanceGetComputeInstances(void *instance, u32 id, void **out, u32 *count) {
  u32 gpu, gi;
  BEGIN(0);
  PRIVILEGED;
  int answer = unpack(instance, GPU_INSTANCE, &gpu, &gi, NULL);
  if (answer) END(answer);
  if (id > 4) END(NOT_SUPPORTED);
  *count = 0;
  for (u32 c = 0; c < CIS; c++)
    if (S.gpu[gpu].gi[gi].ci[c].used && S.gpu[gpu].gi[gi].ci[c].slices == ci_slices[id])
      out[(*count)++] = pack(COMPUTE_INSTANCE, gpu, gi, c);
  END(OK);
}
API int nvmlGpuInstanceGetComputeInstanceById(void *instance, u32 id, void **out) {
  u32 gpu, gi;
  BEGIN(0);
  PRIVILEGED;
  int answer = unpack(instance, GPU_INSTANCE, &gpu, &gi, NULL);
  if (answer) END(answer);
  if (id >= CIS || !S.gpu[gpu].gi[gi].ci[id].used) END(NOT_FOUND);
  *out = pack(COMPUTE_INSTANCE, gpu, gi, id);
  END(OK);
}
typedef struct { void *device, *instance; u32 id, profile; Placement place; } CiInfo;
_Static_assert(sizeof(CiInfo) == 32, "nvmlComputeInstanceInfo_t");
API int nvmlComputeInstanceGetInfo_v2(void *instance, CiInfo *out) {
  u32 gpu, gi, ci, profile = 0;
  BEGIN(0);
  int answer = unpack(instance, COMPUTE_INSTANCE, &gpu, &gi, &ci);
  if (answer) END(answer);
  while (ci_slices[profile] != S.gpu[gpu].gi[gi].ci[ci].slices) profile++;
  *out = (CiInfo){pack(DEVICE, gpu, 0, 0), pack(GPU_INSTANCE, gpu, gi, 0), ci, profile,
                  {S.gpu[gpu].gi[gi].ci[ci].start, ci_slices[profile]}};
  END(OK);
}

/* ---- MIG devices ---- */

API int nvmlDeviceGetMaxMigDeviceCount(void *device, u32 *count) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  *count = S.gpu[gpu].mode ? most_devices(gpu) : 0;
  END(OK);
}
API int nvmlDeviceGetMigDeviceHandleByIndex(void *device, u32 index, void **out) {
  u32 gpu, found = 0;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  for (u32 i = 0; i < GIS; i++)
    for (u32 c = 0; c < CIS; c++)
      if (S.gpu[gpu].gi[i].used && S.gpu[gpu].gi[i].ci[c].used && found++ == index) {
        *out = pack(MIG, gpu, i, c);
        END(OK);
      }
  END(NOT_FOUND);
}
API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *mig, void **out) {
  u32 gpu, gi, ci;
  BEGIN(0);
  int answer = unpack(mig, MIG, &gpu, &gi, &ci);
  if (answer) END(answer);
  *out = pack(DEVICE, gpu, 0, 0);
  END(OK);
}
API int nvmlDeviceGetGpuInstanceId(void *mig, u32 *id) {
  u32 gpu, gi, ci;
  BEGIN(0);
  int answer = unpack(mig, MIG, &gpu, &gi, &ci);
  if (!answer) *id = gi;
  END(answer);
}
API int nvmlDeviceGetComputeInstanceId(void *mig, u32 *id) {
  u32 gpu, gi, ci;
  BEGIN(0);
  int answer = unpack(mig, MIG, &gpu, &gi, &ci);
  if (!answer) *id = ci;
  END(answer);
}
