/* What tests order of the double: GPUs, and what goes wrong. 0 is done. See double.h. */
#include "double.h"

#include <fcntl.h>
#include <unistd.h>

API int double_new(const char *path, const char *const *keys, u32 count) {
  State fresh;
  memset(&fresh, 0, sizeof fresh);
  fresh.magic = MAGIC;
  fresh.root = 1;
  if (count > GPUS) return INVALID_ARGUMENT;
  for (fresh.gpus = 0; fresh.gpus < count; fresh.gpus++) {
    const Model *found = model_called(keys[fresh.gpus]);
    if (!found) return NOT_FOUND;
    fresh.gpu[fresh.gpus].model = (u32)(found - model_called("a30")); /* the first of the table */
    fresh.gpu[fresh.gpus].gpm = found->hopper;
  }
  inits = 0; /* a driver that nobody in this process has entered */
  int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return UNKNOWN;
  int written = write(file, &fresh, sizeof fresh) == (ssize_t)sizeof fresh;
  close(file);
  return written ? OK : UNKNOWN;
}
#define SET(...) { int answer_ = lock(); if (answer_) return answer_; dirty = 1; __VA_ARGS__; return unlock(OK); }
API int double_root(u32 root) SET(S.root = root)
API int double_fail_change(u32 after, u32 code) SET(S.fail_on = FAIL_CHANGE; S.fail_left = after; S.fail_code = code)
API int double_fail_any(u32 after, u32 code) SET(S.fail_on = FAIL_ANY; S.fail_left = after; S.fail_code = code)
API int double_kill_change(u32 after) SET(S.fail_on = KILL_CHANGE; S.fail_left = after)
API int double_failed(u32 *yes) SET(*yes = !S.fail_on)
API int double_fail_call(const char *name, u32 code)
  SET(snprintf(S.fail_name, sizeof S.fail_name, "%s", name); S.fail_name_code = code)
API int double_needs_reset(u32 gpu, u32 on) SET(S.gpu[gpu].needs_reset = on)
API int double_lost(u32 gpu, u32 on) SET(S.gpu[gpu].lost = on)
API int double_mode(u32 gpu, u32 mode) SET(S.gpu[gpu].mode = S.gpu[gpu].pending = mode)
API int double_gpm(u32 gpu, u32 on, u32 code) SET(S.gpu[gpu].gpm = on; S.gpu[gpu].gpm_return = code)
API int double_activity(u32 gpu, u32 percent) SET(S.gpu[gpu].percent = percent)
API int double_memory(u32 gpu, u64 used, u64 total) SET(S.gpu[gpu].used = used; S.gpu[gpu].total = total)
API int double_no_processes(u32 gpu) SET(S.gpu[gpu].procs = 0)
API int double_process(u32 gpu, u32 gi, u32 ci, u32 pid, u64 memory, u32 percent)
  SET(if (S.gpu[gpu].procs == PROCS) return unlock(INSUFFICIENT_RESOURCES);
      S.gpu[gpu].proc[S.gpu[gpu].procs++] = (Proc){pid, gi, ci, percent, memory})
API int double_changes(u32 *count) SET(*count = S.changes)
API int double_inits(void) { return inits; }
/* A reboot of the machine: instances are gone; the mode survives on Ampere and is off from Hopper on. */
API int double_reboot(u32 gpu)
  SET(memset(S.gpu[gpu].gi, 0, sizeof S.gpu[gpu].gi); S.gpu[gpu].procs = 0; S.gpu[gpu].needs_reset = 0;
      S.gpu[gpu].mode = S.gpu[gpu].pending = model(gpu)->hopper ? 0 : S.gpu[gpu].pending; S.gpu[gpu].generation++)
