/* SPDX-License-Identifier: Apache-2.0 */
/* The fake driver, opened when a communicator is first made: as the real NCCL, which does not need
 * one for its version or a unique id. */
#include <dlfcn.h>
#include <string.h>

#include "fake.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct fake_driver driver;

static void find(void *library, const char *symbol, void *field)
{
    void *address = dlsym(library, symbol);

    if (address == NULL)
        fake_die("libcuda.so.1 lacks %s: not the fake driver", symbol);
    memcpy(field, &address, sizeof(address));
}

static void open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (library == NULL)
        fake_die("%s", dlerror());
    find(library, "cuCtxGetDevice", &driver.ctx_device);
    find(library, "fake_cuda_stream_push", &driver.stream_push);
    find(library, "fake_cuda_stream_device", &driver.stream_device);
    find(library, "fake_cuda_pointer_device", &driver.pointer_device);
    find(library, "fake_cuda_view", &driver.view);
    find(library, "fake_cuda_physical_device", &driver.physical_device);
    find(library, "fake_cuda_context_fail", &driver.context_fail);
}

const struct fake_driver *fake_driver(void)
{
    pthread_once(&once, open_driver);
    return &driver;
}
