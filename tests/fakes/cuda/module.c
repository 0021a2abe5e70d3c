/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Modules, libraries and launches. The image is not run: a kernel is found by its name among those
 * that have a twin for the CPU (kernels.c). What is no image at all is refused.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

/* In a list: what a lost context keeps from being unloaded is not a leak of the program under test.
 */
struct CUmod_st {
    struct CUmod_st *next;
    CUcontext context; /* NULL: a library's, for all contexts */
};
static struct CUmod_st *modules;
static pthread_mutex_t modules_lock = PTHREAD_MUTEX_INITIALIZER;

/* One for each kernel and context, kept for good. Handles of libraries' kernels are those without a
 * context. */
struct CUfunc_st {
    struct CUfunc_st *next;
    const struct fake_kernel *kernel;
    CUcontext context;
};
static struct CUfunc_st *functions; /* under modules_lock */

static bool is_image(const void *image)
{
    static const unsigned char fatbin[4] = {0x50, 0xed, 0x55, 0xba};
    return image != NULL && (memcmp(image, fatbin, 4) == 0 || memcmp(image, "\177ELF", 4) == 0 ||
                             memcmp(image, "//", 2) == 0 || memcmp(image, ".ver", 4) == 0);
}

static CUresult load(CUmodule *out, const void *image, CUcontext context)
{
    if (!is_image(image))
        return FAKE_ERROR_INVALID_IMAGE;
    CUmodule module = calloc(1, sizeof *module);
    if (module == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->context = context;
    pthread_mutex_lock(&modules_lock);
    module->next = modules;
    modules = module;
    pthread_mutex_unlock(&modules_lock);
    *out = module;
    return CUDA_SUCCESS;
}

static CUresult unload(CUmodule module)
{
    pthread_mutex_lock(&modules_lock);
    CUmodule *link = &modules;
    while (*link != NULL && *link != module)
        link = &(*link)->next;
    const CUresult rc = *link != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    if (*link != NULL)
        *link = module->next;
    pthread_mutex_unlock(&modules_lock);
    if (rc == CUDA_SUCCESS)
        free(module);
    return rc;
}

static CUfunction function_of(const struct fake_kernel *kernel, CUcontext context)
{
    pthread_mutex_lock(&modules_lock);
    CUfunction f = functions;
    while (f != NULL && !(f->kernel == kernel && f->context == context))
        f = f->next;
    if (f == NULL && (f = malloc(sizeof *f)) != NULL) {
        *f = (struct CUfunc_st){functions, kernel, context};
        functions = f;
    }
    pthread_mutex_unlock(&modules_lock);
    return f;
}

static CUresult find(CUfunction *out, const char *name, CUcontext context)
{
    const struct fake_kernel *kernel = fake_kernel_find(name);
    if (kernel == NULL)
        return CUDA_ERROR_NOT_FOUND;
    *out = function_of(kernel, context);
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    ENTER(cuModuleLoadData, NEED_CONTEXT);
    return load(out, image, fake_context());
}

CUresult cuModuleUnload(CUmodule module)
{
    ENTER(cuModuleUnload, NEED_CONTEXT);
    return unload(module);
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    ENTER(cuModuleGetFunction, NEED_CONTEXT);
    return module == NULL ? CUDA_ERROR_INVALID_HANDLE : find(out, name, module->context);
}

CUresult cuLibraryLoadData(CUlibrary *out, const void *image, int *options, void **values,
                           unsigned n, int *library_options, void **library_values,
                           unsigned n_library)
{
    ENTER(cuLibraryLoadData, NEED_INIT);
    CUmodule module;
    CUresult rc = load(&module, image, NULL);
    if (rc == CUDA_SUCCESS)
        *out = (CUlibrary)module;
    return rc;
}

CUresult cuLibraryUnload(CUlibrary library)
{
    ENTER(cuLibraryUnload, NEED_INIT);
    return unload((CUmodule)library);
}

CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name)
{
    ENTER(cuLibraryGetKernel, NEED_INIT);
    CUfunction function;
    CUresult rc = find(&function, name, NULL);
    if (rc == CUDA_SUCCESS)
        *out = (CUkernel)function;
    return rc;
}

CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel)
{
    ENTER(cuKernelGetFunction, NEED_CONTEXT);
    *out = function_of(((CUfunction)kernel)->kernel, fake_context());
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

struct call {
    const struct fake_kernel *kernel;
    struct fake_launch launch;
    _Alignas(16) unsigned char parameter[];
};

static void run(void *data)
{
    struct call *call = data;
    if (!fake_stream_is_faulted())
        call->kernel->run(&call->launch, call->parameter);
    free(call);
}

CUresult cuLaunchKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream s, void **parameters, void **extra)
{
    ENTER(cuLaunchKernel, NEED_CONTEXT);
    if (f == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if ((uint64_t)grid_x * grid_y * grid_z == 0 || threads == 0 || threads > 1024 ||
        grid_y > 65535 || grid_z > 65535 || extra != NULL || parameters == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream;
    CUresult rc = fake_stream_get(s, &stream);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (f->context != fake_stream_context_of(stream))
        return CUDA_ERROR_INVALID_HANDLE;
    const struct fake_kernel *kernel = f->kernel;
    struct call *call = malloc(sizeof *call + kernel->parameter_bytes);
    if (call == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    call->kernel = kernel;
    call->launch = (struct fake_launch){{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}};
    /* As the driver does: the values are those at the time of the call. */
    memcpy(call->parameter, parameters[0], kernel->parameter_bytes);
    rc = fake_stream_push_run(s, run, call);
    if (rc != CUDA_SUCCESS)
        free(call);
    return rc;
}
