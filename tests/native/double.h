/* A TEST DOUBLE of NVIDIA's management library (libnvidia-ml.so.1). It is no driver and reaches no GPU.
 *
 * It has NVML's ABI for the calls that hybridsched makes (names, argument order and structures as nvidia-ml-py
 * declares them), so that the real pynvml loads it. The GPUs live in the file that HYBRIDSCHED_NVML_DOUBLE names; each
 * call locks and reads it whole, and writes it back when it changed something, so that several processes see the same
 * GPUs. Without that variable nvmlInit says that no driver is loaded.
 *
 * The rules are those of NVML's documentation and of NVIDIA's MIG User Guide: instances only in MIG mode, at the
 * placements of their profile, not over one another; compute instances go before their GPU instance; what a process
 * runs on is IN_USE; a mode change on a busy GPU succeeds, says IN_USE and stays pending; utilisation is not supported
 * in MIG mode; GPM from Hopper on. Functions `double_*` are for tests: they set up the GPUs and what goes wrong.
 *
 * Build: cc -shared -fPIC -fvisibility=hidden -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 *.c
 */
#ifndef NVML_DOUBLE_H
#define NVML_DOUBLE_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
typedef unsigned int u32;
typedef unsigned long long u64;

enum {
  OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, RESET_REQUIRED = 16, IN_USE = 19, MEMORY = 20,
  INSUFFICIENT_RESOURCES = 23, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

/* ---- what a GPU model is: tables in state.c ---- */

#define PROFILES 7
typedef struct { u32 which, id, slices, size, starts, most; } Shape; /* starts: a bit for each first memory slice */
typedef struct {
  const char *key, *name;
  u32 pci, hopper;
  const Shape *shapes; /* NULL: no MIG */
  const char *names[PROFILES];
  u32 sms[PROFILES];   /* of an instance; 0 where NVIDIA's pages print none: the reader must not rely on it */
  double gib[PROFILES];
  double total_gib;
} Model;

/* ---- the state file ---- */

#define GPUS 16
#define GIS 16
#define CIS 8
#define PROCS 16
#define MAGIC 0x4e564d4c64626c32ull
typedef struct { u32 used, slices, start; u64 serial; } Ci;
typedef struct { u32 used, profile, start; u64 serial; Ci ci[CIS]; } Gi; /* profile: index into the model's shapes */
typedef struct { u32 pid, gi, ci, percent; u64 memory; } Proc; /* gi, ci: ~0 on the whole GPU */
typedef struct {
  u32 model, mode, pending, generation, lost, needs_reset, gpm, gpm_return, percent, procs;
  u64 used, total; /* set by a test; total 0: the model's */
  Gi gi[GIS];
  Proc proc[PROCS];
} Gpu;
typedef struct {
  u64 magic, serial;
  u32 gpus, root;
  u32 fail_left, fail_code, fail_on; /* the n-th call that changes something fails; fail_on: enum below */
  char fail_name[64];                /* every call of this name fails */
  u32 fail_name_code;
  u32 changes;                       /* calls that change something, so far */
  Gpu gpu[GPUS];
} State;

enum { FAIL_CHANGE = 1, FAIL_ANY = 2, KILL_CHANGE = 3 }; /* KILL: the calling process dies before it changes anything */
extern State S;    /* as read at the beginning of the call */
extern int dirty;  /* whether it must be written back */
extern int inits;  /* how often this process is inside NVML */

int lock(void);
int unlock(int answer);
/* Begin a call: locked, initialised, and not told to fail. `changing`: counts for the n-th call that fails. */
int begin(const char *name, int changing);
#define BEGIN(changing) { int answer_ = begin(__func__, changing); if (answer_) return answer_; }
#define END(code) return unlock(code)
/* NVML's documentation: "Requires privileged user". */
#define PRIVILEGED if (!S.root) END(NO_PERMISSION)

/* ---- handles: what they name, packed into the pointer with a count of what stood there before. A GPU's go stale when
 * its MIG mode changes, those of an instance with the instance. ---- */

enum { DEVICE = 1, MIG = 2, GPU_INSTANCE = 3, COMPUTE_INSTANCE = 4 };
void *pack(u64 kind, u64 gpu, u64 gi, u64 ci);
int unpack(void *handle, u32 kind, u32 *gpu, u32 *gi, u32 *ci);
int either(void *handle, u32 *gpu, u32 *gi, u32 *ci); /* a GPU (gi = ~0) or a MIG device */

/* ---- of one GPU ---- */

const Model *model_called(const char *key);  /* NULL: none */
const Model *model(u32 gpu);
u32 bits(u32 start, u32 size);               /* the memory slices of a placement */
int shape_of(u32 gpu, u32 id);               /* the profile with this ID; -1: none */
u32 taken(u32 gpu);                          /* memory slices with an instance */
int room(u32 gpu, u32 shape);                /* whether counts allow one more */
u64 memory_of(u32 gpu, u32 shape);           /* bytes of an instance */
u64 total_of(u32 gpu);                       /* bytes of the GPU */
u32 most_devices(u32 gpu);                   /* MIG devices that it can have */

#endif
