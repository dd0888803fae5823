// A runtime library with Vortex's functions and no Vortex: device memory is host memory, and vx_start runs the kernel's
// native build from the shim ($FAKE_VORTEX_KERNEL). Counters are made up: address * 1000 + core.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fails(const char* name) {       // $FAKE_VORTEX_FAIL names the call that returns 7; every call is logged
  const char* log = getenv("FAKE_VORTEX_LOG");
  if (log) {
    FILE* file = fopen(log, "a");
    fprintf(file, "%s\n", name);
    fclose(file);
  }
  const char* wanted = getenv("FAKE_VORTEX_FAIL");
  return wanted && strcmp(wanted, name) == 0 ? 7 : 0;
}

int vx_dev_open(void** device) {
  *device = malloc(1);
  if (!getenv("VORTEX_DRIVER")) return 8;
  return fails("vx_dev_open");
}
int vx_dev_close(void* device) {
  free(device);
  return fails("vx_dev_close");
}
int vx_dev_caps(void* device, uint32_t id, uint64_t* value) {
  const char* threads = getenv("FAKE_VORTEX_THREADS");
  const char* tensor_unit = getenv("FAKE_VORTEX_TENSOR_UNIT");
  const char* file = getenv("FAKE_VORTEX_WRITES");
  if (file) fclose(fopen(file, "w"));
  if (id == 7) return *value = (uint64_t)(tensor_unit && atoi(tensor_unit)) << 38, fails("vx_dev_caps");
  if (id == 6) return *value = 16384, fails("vx_dev_caps");
  const char* warps = getenv("FAKE_VORTEX_WARPS");
  *value = id == 1 ? (threads ? atoi(threads) : 8) : id == 2 ? (warps ? atoi(warps) : 2) : 4;
  return fails("vx_dev_caps");
}
int vx_mem_alloc(void* device, uint64_t size, int flags, void** buffer) {
  *buffer = calloc(1, size);
  return fails("vx_mem_alloc");
}
int vx_mem_free(void* buffer) { return fails("vx_mem_free"); }
int vx_mem_address(void* buffer, uint64_t* address) {
  *address = (uint64_t)(uintptr_t)buffer;
  return fails("vx_mem_address");
}
int vx_copy_to_dev(void* buffer, const void* host, uint64_t offset, uint64_t size) {
  memcpy((char*)buffer + offset, host, size);
  return fails("vx_copy_to_dev");
}
int vx_copy_from_dev(void* host, void* buffer, uint64_t offset, uint64_t size) {
  memcpy(host, (char*)buffer + offset, size);
  return fails("vx_copy_from_dev");
}
static int upload(const void* content, uint64_t size, void** buffer) {
  *buffer = malloc(size);
  memcpy(*buffer, content, size);
  return 0;
}
int vx_upload_kernel_bytes(void* device, const void* content, uint64_t size, void** buffer) {
  return upload(content, size, buffer) + fails("vx_upload_kernel_bytes");
}
int vx_upload_bytes(void* device, const void* content, uint64_t size, void** buffer) {
  return upload(content, size, buffer) + fails("vx_upload_bytes");
}
int vx_start(void* device, void* kernel, void* arguments) {
  if (getenv("FAKE_VORTEX_ABORT")) {
    fprintf(stderr, "divergent branch!\n");
    abort();
  }
  void* library = dlopen(getenv("FAKE_VORTEX_KERNEL"), RTLD_NOW);
  if (!library) return 9;
  const char* (*run)(const void*) = (const char* (*)(const void*))dlsym(library, "vx_shim_run");
  return (run(arguments) ? 10 : 0) + fails("vx_start");
}
int vx_ready_wait(void* device, uint64_t timeout) { return fails("vx_ready_wait"); }
#ifndef WITHOUT_COUNTERS
int vx_mpm_query(void* device, uint32_t address, uint32_t core, uint64_t* value) {
  *value = getenv("FAKE_VORTEX_UNWRITTEN") ? 0xBAADF00DBAADF00D : address * 1000 + core;
  return fails("vx_mpm_query");
}
#endif
