/* The test double's library and GPUs: names, memory, processes, activity. See double.h. */
#include "double.h"

/* ---- NVML: the library and its GPUs ---- */

API int nvmlInitWithFlags(u32 flags) {
  (void)flags;
  BEGIN(0);
  inits++;
  END(OK);
}
API int nvmlShutdown(void) {
  BEGIN(0);
  inits--;
  END(OK);
}
API const char *nvmlErrorString(int code) {
  static char text[64];
  snprintf(text, sizeof text, "code %d of the NVML test double", code);
  return text;
}
API int nvmlSystemGetDriverVersion(char *out, u32 length) {
  BEGIN(0);
  snprintf(out, length, "0.0-test-double");
  END(OK);
}
API int nvmlDeviceGetCount_v2(u32 *count) {
  BEGIN(0);
  *count = S.gpus;
  END(OK);
}
API int nvmlDeviceGetHandleByIndex_v2(u32 index, void **handle) {
  BEGIN(0);
  if (index >= S.gpus) END(INVALID_ARGUMENT);
  if (S.gpu[index].lost) END(GPU_IS_LOST);
  *handle = pack(DEVICE, index, 0, 0);
  END(OK);
}
static void gpu_uuid(u32 gpu, char *out, u32 length) {
  snprintf(out, length, "GPU-%08x-0000-0000-0000-000000000000", gpu);
}
static void mig_uuid(u32 gpu, u32 gi, u32 ci, char *out, u32 length) {
  snprintf(out, length, "MIG-%08x-0000-0000-0000-%012llx", gpu, S.gpu[gpu].gi[gi].ci[ci].serial);
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  char text[80];
  BEGIN(0);
  for (u32 g = 0; g < S.gpus; g++) {
    gpu_uuid(g, text, sizeof text);
    if (!strcmp(text, uuid)) { *handle = pack(DEVICE, g, 0, 0); END(OK); }
    for (u32 i = 0; i < GIS; i++)
      for (u32 c = 0; c < CIS; c++)
        if (S.gpu[g].gi[i].used && S.gpu[g].gi[i].ci[c].used) {
          mig_uuid(g, i, c, text, sizeof text);
          if (!strcmp(text, uuid)) { *handle = pack(MIG, g, i, c); END(OK); }
        }
  }
  END(NOT_FOUND);
}
API int nvmlDeviceGetUUID(void *device, char *out, u32 length) {
  u32 gpu, gi, ci;
  BEGIN(0);
  int answer = either(device, &gpu, &gi, &ci);
  if (answer) END(answer);
  if (gi == ~0u) gpu_uuid(gpu, out, length); else mig_uuid(gpu, gi, ci, out, length);
  END(OK);
}
API int nvmlDeviceGetName(void *device, char *out, u32 length) {
  u32 gpu, gi, ci;
  BEGIN(0);
  int answer = either(device, &gpu, &gi, &ci);
  if (answer) END(answer);
  if (gi == ~0u) snprintf(out, length, "%s", model(gpu)->name);
  else snprintf(out, length, "%s MIG %s", model(gpu)->name, model(gpu)->names[S.gpu[gpu].gi[gi].profile]);
  END(OK);
}
typedef struct { char legacy[16]; u32 domain, bus, device, pci, subsystem; char bus_id[32]; } Pci;
_Static_assert(sizeof(Pci) == 68, "nvmlPciInfo_t");
API int nvmlDeviceGetPciInfo_v3(void *device, Pci *out) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  memset(out, 0, sizeof *out);
  out->bus = gpu + 1;
  out->pci = model(gpu)->pci;
  snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", gpu + 1);
  END(OK);
}
API int nvmlDeviceGetMinorNumber(void *device, u32 *out) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (!answer) *out = S.gpus - 1 - gpu; /* the other way round: the device file's number is not the index */
  END(answer);
}
API int nvmlDeviceGetArchitecture(void *device, u32 *out) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  *out = !strcmp(model(gpu)->key, "b200") ? 10 : model(gpu)->hopper ? 9 : model(gpu)->shapes ? 7 : 8;
  END(OK);
}

/* ---- memory, processes, activity ---- */

typedef struct { u64 total, free, used; } Memory;
API int nvmlDeviceGetMemoryInfo(void *device, Memory *out) {
  u32 gpu, gi, ci;
  BEGIN(0);
  int answer = either(device, &gpu, &gi, &ci);
  if (answer) END(answer);
  out->total = gi == ~0u ? total_of(gpu) : memory_of(gpu, S.gpu[gpu].gi[gi].profile);
  out->used = gi == ~0u ? S.gpu[gpu].used : 0;
  for (u32 i = 0; i < S.gpu[gpu].procs; i++)
    if (gi != ~0u && S.gpu[gpu].proc[i].gi == gi && S.gpu[gpu].proc[i].memory != ~0ull)
      out->used += S.gpu[gpu].proc[i].memory;
  out->free = out->total - out->used;
  END(OK);
}
typedef struct { u32 pid; u64 memory; u32 gi, ci; } Running;
_Static_assert(sizeof(Running) == 24, "nvmlProcessInfo_t");
API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, Running *out) {
  u32 gpu, gi, ci, found = 0;
  BEGIN(0);
  int answer = either(device, &gpu, &gi, &ci);
  if (answer) END(answer);
  for (u32 i = 0; i < S.gpu[gpu].procs; i++) {
    Proc *p = &S.gpu[gpu].proc[i];
    if (gi != ~0u && (p->gi != gi || p->ci != ci)) continue;
    if (found < *count && out) out[found] = (Running){p->pid, p->memory, p->gi, p->ci};
    found++;
  }
  answer = found > *count || (found && !out) ? INSUFFICIENT_SIZE : OK;
  *count = found;
  END(answer);
}
API int nvmlDeviceGetUtilizationRates(void *device, u32 *out) {
  u32 gpu, gi, ci;
  BEGIN(0);
  int answer = either(device, &gpu, &gi, &ci);
  if (answer) END(answer);
  if (S.gpu[gpu].mode) END(NOT_SUPPORTED);
  out[0] = S.gpu[gpu].percent;
  out[1] = 0;
  END(OK);
}
typedef struct { u32 pid; u64 at; u32 sm, mem, enc, dec; } Share;
_Static_assert(sizeof(Share) == 32, "nvmlProcessUtilizationSample_t");
API int nvmlDeviceGetProcessUtilization(void *device, Share *out, u32 *count, u64 since) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  if (S.gpu[gpu].mode) END(NOT_SUPPORTED);
  if (!S.gpu[gpu].procs) END(NOT_FOUND);
  u32 room_for = *count;
  *count = S.gpu[gpu].procs;
  if (!out || room_for < *count) END(INSUFFICIENT_SIZE);
  for (u32 i = 0; i < *count; i++)
    out[i] = (Share){S.gpu[gpu].proc[i].pid, since + 1, S.gpu[gpu].proc[i].percent, 0, 0, 0};
  END(OK);
}

/* GPM: a sample holds what the GPU (or the GPU instance) did when it was taken; a metric is that of the newer one. */
typedef struct { u32 taken, percent, code; } Sample;
typedef struct { u32 id; int code; double value; const char *names[3]; } Metric;
_Static_assert(sizeof(Metric) == 40, "nvmlGpmMetric_t");
typedef struct { u32 version, count; Sample *older, *newer; Metric metric[]; } Ask;
API int nvmlGpmQueryDeviceSupport(void *device, u32 *support) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  if (support[0] != 1) END(ARGUMENT_VERSION_MISMATCH);
  support[1] = S.gpu[gpu].gpm;
  END(OK);
}
API int nvmlGpmSampleAlloc(Sample **sample) {
  BEGIN(0);
  *sample = calloc(1, sizeof **sample);
  END(*sample ? OK : MEMORY);
}
API int nvmlGpmSampleFree(Sample *sample) {
  BEGIN(0);
  free(sample);
  END(OK);
}
static int take(u32 gpu, u32 gi, Sample *sample) {
  if (!S.gpu[gpu].gpm) return NOT_SUPPORTED;
  u32 percent = S.gpu[gpu].percent;
  if (gi != ~0u) { /* the busiest process in the instance */
    percent = 0;
    for (u32 i = 0; i < S.gpu[gpu].procs; i++)
      if (S.gpu[gpu].proc[i].gi == gi && S.gpu[gpu].proc[i].percent > percent) percent = S.gpu[gpu].proc[i].percent;
  }
  *sample = (Sample){1, percent, S.gpu[gpu].gpm_return};
  return OK;
}
API int nvmlGpmSampleGet(void *device, Sample *sample) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  END(answer ? answer : take(gpu, ~0u, sample));
}
API int nvmlGpmMigSampleGet(void *device, u32 gi, Sample *sample) {
  u32 gpu;
  BEGIN(0);
  int answer = unpack(device, DEVICE, &gpu, NULL, NULL);
  if (answer) END(answer);
  if (gi >= GIS || !S.gpu[gpu].gi[gi].used) END(NOT_FOUND);
  END(take(gpu, gi, sample));
}
API int nvmlGpmMetricsGet(Ask *ask) {
  BEGIN(0);
  if (ask->version != 1) END(ARGUMENT_VERSION_MISMATCH);
  if (!ask->older || !ask->newer || !ask->older->taken || !ask->newer->taken) END(INVALID_ARGUMENT);
  for (u32 i = 0; i < ask->count; i++) {
    ask->metric[i].code = ask->metric[i].id == 1 ? (int)ask->newer->code : NOT_SUPPORTED;
    ask->metric[i].value = ask->newer->percent;
  }
  END(OK);
}
