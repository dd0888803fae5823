// A libcuda that notes what it is asked to do, for tests of csrc/host/cuda/driver.cpp on machines without a GPU. The
// file that FAKE_CUDA_LOG names receives a line for each call. FAKE_CUDA_FAIL names a function that fails.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int note(const char* function, const char* format, ...) {
  const char *path = getenv("FAKE_CUDA_LOG"), *fails = getenv("FAKE_CUDA_FAIL");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (file) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(file, "%s ", function);
    vfprintf(file, format, arguments);
    fprintf(file, "\n");
    va_end(arguments);
    fclose(file);
  }
  return fails && !strcmp(fails, function) ? 700 : 0;
}

static void* current_context = NULL;

int cuInit(unsigned flags) { return note("cuInit", "%u", flags); }
int cuGetErrorName(int error, const char** name) {
  *name = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = "a made-up error";
  return error == 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return note("cuDeviceGet", "%d", index);
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
  return note("cuDeviceGetAttribute", "%d %d", attribute, device);
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(uintptr_t)(0x1000 + device);
  return note("cuDevicePrimaryCtxRetain", "%d", device);
}
int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return note("cuCtxGetCurrent", "");
}
int cuCtxPushCurrent_v2(void* context) {
  current_context = context;
  return note("cuCtxPushCurrent", "%p", context);
}
int cuCtxPopCurrent_v2(void** context) {
  *context = current_context;
  current_context = NULL;
  return note("cuCtxPopCurrent", "");
}
int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  *library = (void*)0x2000;
  return note("cuLibraryLoadData", "%.16s", (const char*)code);
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  (void)library;
  *kernel = (void*)0x3000;
  return note("cuLibraryGetKernel", "%s", name);
}
int cuKernelGetFunction(void** function, void* kernel) {
  (void)kernel;
  static uintptr_t next = 0x4000;
  *function = (void*)next++;
  return note("cuKernelGetFunction", "%p", *function);
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return note("cuFuncSetAttribute", "%p %d %d", function, attribute, value);
}
struct config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  struct {
    int id, padding, value;
    char rest[60];
  }* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const struct config* c, void* function, void** parameters, void** extra) {
  (void)extra;
  return note("cuLaunchKernelEx", "%p grid %u %u %u block %u %u %u shared %u stream %p attributes %u: %d %d first %llx",
              function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared_bytes,
              c->stream, c->count, c->attributes[0].id, c->attributes[0].value,
              *(const unsigned long long*)parameters[0]);
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  memset(map, 0xAB, 128);
  return note("cuTensorMapEncodeTiled", "%d %u %d sizes %llu strides %llu box %u steps %u %d %d %d %d", type, rank,
              address != NULL, (unsigned long long)sizes[4], (unsigned long long)strides[3], box[4], steps[4],
              interleave, swizzle, promotion, fill);
}
int cuMemsetD8Async(void* to, unsigned char value, size_t count, void* stream) {
  memset(to, value, count);
  return note("cuMemsetD8Async", "%u %zu %p", value, count, stream);
}
int cuMemsetD32Async(void* to, unsigned value, size_t count, void* stream) {
  for (size_t i = 0; i < count; ++i) ((unsigned*)to)[i] = value;
  return note("cuMemsetD32Async", "%x %zu %p", value, count, stream);
}
int cuMemAlloc_v2(void** memory, size_t bytes) {
  *memory = malloc(bytes);
  return note("cuMemAlloc", "%zu", bytes);
}
int cuStreamCreate(void** stream, unsigned flags) {
  *stream = (void*)0x5000;
  return note("cuStreamCreate", "%u", flags);
}
int cuStreamSynchronize(void* stream) { return note("cuStreamSynchronize", "%p", stream); }
int cuStreamDestroy_v2(void* stream) { return note("cuStreamDestroy", "%p", stream); }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int kept = 0;
  const int before = kept;
  kept = *mode, *mode = before;
  return note("cuThreadExchangeStreamCaptureMode", "%d", kept);
}
