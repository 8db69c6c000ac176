/* The test double's GPUs: tables of models, the file with the state, handles. See double.h. */
#define _GNU_SOURCE
#include "double.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

/* ---- profiles and placements by model ---- */

enum { P1 = 0, P2 = 1, P3 = 2, P4 = 3, P7 = 4, P1ME = 7, P2ME = 8, P1DOUBLE = 9 };
static const Shape seven[PROFILES] = {
  {P1, 19, 1, 1, 0x7f, 7}, {P1ME, 20, 1, 1, 0x7f, 1}, {P1DOUBLE, 15, 1, 2, 0x55, 4}, {P2, 14, 2, 2, 0x15, 3},
  {P3, 9, 3, 4, 0x11, 2},  {P4, 5, 4, 4, 0x01, 1},    {P7, 0, 7, 8, 0x01, 1}};
static const Shape four[PROFILES] = {
  {P1, 14, 1, 1, 0x0f, 4}, {P1ME, 21, 1, 1, 0x0f, 1}, {P2, 5, 2, 2, 0x05, 2}, {P2ME, 6, 2, 2, 0x05, 1},
  {P4, 0, 4, 4, 0x01, 1},  {0, 0, 0, 0, 0, 0},        {0, 0, 0, 0, 0, 0}};

static const Model models[] = {
  {"a30", "NVIDIA A30", 0x20B710DE, 0, four, {"1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"},
   {14, 14, 28, 28, 56}, {5.8125, 5.8125, 11.6875, 11.6875, 23.4375}, 24},
  {"a100-40gb", "NVIDIA A100-SXM4-40GB", 0x20B010DE, 0, seven,
   {"1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"}, {14, 14, 14, 28, 42, 56, 98},
   {4.75, 4.75, 9.625, 9.625, 19.5, 19.5, 39.25}, 40},
  {"a100-80gb", "NVIDIA A100-SXM4-80GB", 0x20B210DE, 0, seven,
   {"1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"}, {14, 14, 14, 28, 42, 56, 98},
   {9.5, 9.5, 19.5, 19.5, 39.25, 39.25, 79.0}, 80},
  {"h100-80gb", "NVIDIA H100 80GB HBM3", 0x233010DE, 1, seven,
   {"1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"}, {16, 16, 26, 32, 60, 64, 132},
   {9.75, 9.75, 19.625, 19.625, 39.5, 39.5, 79.25}, 80},
  {"h100-94gb", "NVIDIA H100 NVL", 0x232110DE, 1, seven,
   {"1g.12gb", "1g.12gb+me", "1g.24gb", "2g.24gb", "3g.47gb", "4g.47gb", "7g.94gb"}, {0}, {0}, 94},
  {"h200", "NVIDIA H200", 0x233510DE, 1, seven,
   {"1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"}, {0}, {0}, 141},
  {"b200", "NVIDIA B200", 0x290110DE, 1, seven,
   {"1g.23gb", "1g.23gb+me", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"}, {0}, {0}, 180},
  {"none", "NVIDIA L40S", 0x26B910DE, 0, NULL, {0}, {0}, {0}, 48},
};


const Model *model_called(const char *key) {
  for (u32 m = 0; m < sizeof models / sizeof *models; m++)
    if (!strcmp(models[m].key, key)) return &models[m];
  return NULL;
}

/* ---- the state file ---- */

State S;
int dirty = 0, inits = 0;
static int fd = -1;

int lock(void) {
  const char *path = getenv("HYBRIDSCHED_NVML_DOUBLE");
  if (!path) return DRIVER_NOT_LOADED;
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return DRIVER_NOT_LOADED;
  if (flock(file, LOCK_EX)) { /* holds out other processes and, each having its own opening, other threads */
    close(file);
    return DRIVER_NOT_LOADED;
  }
  if (pread(file, &S, sizeof S, 0) != (ssize_t)sizeof S || S.magic != MAGIC) {
    close(file);
    return DRIVER_NOT_LOADED;
  }
  fd = file;
  dirty = 0;
  return OK;
}

int unlock(int answer) {
  int file = fd;
  if (dirty && pwrite(file, &S, sizeof S, 0) != (ssize_t)sizeof S) answer = UNKNOWN;
  close(file);
  return answer;
}

int begin(const char *name, int changing) {
  int answer = lock();
  if (answer) return answer;
  if (!inits && strcmp(name, "nvmlInitWithFlags")) return unlock(UNINITIALIZED);
  if (S.fail_name[0] && !strcmp(name, S.fail_name)) return unlock((int)S.fail_name_code);
  if (changing) S.changes++;
  dirty = changing || S.fail_on == FAIL_ANY;
  if (S.fail_on == FAIL_ANY || (S.fail_on && changing))
    if (S.fail_left-- == 0) {
      int die = S.fail_on == KILL_CHANGE;
      S.fail_on = 0;
      int answer_ = unlock((int)S.fail_code);
      if (die) raise(SIGKILL);
      return answer_;
    }
  return changing && !S.root ? unlock(NO_PERMISSION) : OK;
}

/* ---- handles ---- */

static u64 age(u64 kind, u64 gpu, u64 gi, u64 ci) {
  Gpu *g = &S.gpu[gpu];
  return (kind == DEVICE ? g->generation : kind == GPU_INSTANCE ? g->gi[gi].serial : g->gi[gi].ci[ci].serial) & 0xffff;
}
void *pack(u64 kind, u64 gpu, u64 gi, u64 ci) {
  return (void *)(uintptr_t)(kind << 56 | age(kind, gpu, gi, ci) << 32 | (gpu + 1) << 16 | gi << 8 | ci);
}
int unpack(void *handle, u32 kind, u32 *gpu, u32 *gi, u32 *ci) {
  u64 h = (u64)(uintptr_t)handle;
  u32 g = (u32)(h >> 16 & 0xffff), i = (u32)(h >> 8 & 0xff), c = (u32)(h & 0xff);
  if (h >> 56 != kind || !g || g > S.gpus || i >= GIS || c >= CIS) return INVALID_ARGUMENT;
  *gpu = g - 1;
  if (gi) *gi = i;
  if (ci) *ci = c;
  if (S.gpu[*gpu].lost) return GPU_IS_LOST;
  if ((h >> 32 & 0xffff) != age(kind, *gpu, i, c)) return INVALID_ARGUMENT;
  if (kind != DEVICE && !S.gpu[*gpu].gi[i].used) return INVALID_ARGUMENT;
  if ((kind == MIG || kind == COMPUTE_INSTANCE) && !S.gpu[*gpu].gi[i].ci[c].used) return INVALID_ARGUMENT;
  return OK;
}
int either(void *handle, u32 *gpu, u32 *gi, u32 *ci) {
  int answer = unpack(handle, DEVICE, gpu, NULL, NULL);
  if (answer == OK) { *gi = *ci = ~0u; return OK; }
  return (u64)(uintptr_t)handle >> 56 == DEVICE ? answer : unpack(handle, MIG, gpu, gi, ci);
}
const Model *model(u32 gpu) { return &models[S.gpu[gpu].model]; }
u32 bits(u32 start, u32 size) { return ((1u << size) - 1) << start; }
int shape_of(u32 gpu, u32 id) {
  if (model(gpu)->shapes)
    for (int i = 0; i < PROFILES; i++)
      if (model(gpu)->names[i] && model(gpu)->shapes[i].id == id) return i;
  return -1;
}
u32 taken(u32 gpu) {
  u32 found = 0;
  for (u32 i = 0; i < GIS; i++)
    if (S.gpu[gpu].gi[i].used)
      found |= bits(S.gpu[gpu].gi[i].start, model(gpu)->shapes[S.gpu[gpu].gi[i].profile].size);
  return found;
}
static int media(const char *name) { const char *plus = strchr(name, '+'); return plus && !strcmp(plus, "+me"); }
int room(u32 gpu, u32 shape) {
  u32 like = 0, me = 0;
  for (u32 i = 0; i < GIS; i++)
    if (S.gpu[gpu].gi[i].used) {
      like += S.gpu[gpu].gi[i].profile == shape;
      me += media(model(gpu)->names[S.gpu[gpu].gi[i].profile]);
    }
  return like < model(gpu)->shapes[shape].most && !(me && media(model(gpu)->names[shape]));
}
u64 memory_of(u32 gpu, u32 shape) {
  double gib = model(gpu)->gib[shape];
  if (gib == 0) gib = model(gpu)->total_gib * model(gpu)->shapes[shape].size / 8;
  return (u64)(gib * 1024) << 20;
}
u64 total_of(u32 gpu) {
  return S.gpu[gpu].total ? S.gpu[gpu].total : (u64)(model(gpu)->total_gib * 1024) << 20;
}
u32 most_devices(u32 gpu) { return model(gpu)->shapes == four ? 4 : 7; }
