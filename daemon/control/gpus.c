/* SPDX-License-Identifier: Apache-2.0 */
#include "control/gpus.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/words.h"
#include "control/worker_spawn.h"

/* Loading the driver takes a second at most on a machine that is well. */
static const uint64_t LIMIT_NS = UINT64_C(10) * 1000000000;

/* ------------------------------------------------------------------ what it says */

static bool take(const char *line, const char *key, char *out, size_t size)
{
    size_t length = strlen(key);
    if (strncmp(line, key, length) != 0 || line[length] != ' ')
        return false;
    snprintf(out, size, "%s", line + length + 1);
    return true;
}

static void take_gpu(struct gpus *gpus, const char *line)
{
    struct gpu *gpu = &gpus->gpus[gpus->n_gpus];
    char mps[16];
    int name_at = 0;
    if (gpus->n_gpus < GPUS_MAX &&
        sscanf(line, "gpu %47s %" SCNu64 " %15s %15s %15s %n", gpu->uuid, &gpu->memory_bytes,
               gpu->compute, gpu->mode, mps, &name_at) == 5 &&
        name_at > 0) {
        gpu->has_mps = strcmp(mps, "mps") == 0;
        snprintf(gpu->name, sizeof gpu->name, "%s", line + name_at);
        gpus->n_gpus++;
    }
}

static bool is_missing(const char *version)
{
    return !*version || *version == '-';
}

/* Could a worker make a context beside a trainer's? */
static bool is_shareable(const struct gpu *gpu)
{
    return strcmp(gpu->mode, "default") == 0 ||
           (strcmp(gpu->mode, "exclusive") == 0 && gpu->has_mps);
}

static bool is_any_shareable(const struct gpus *gpus)
{
    for (unsigned i = 0; i < gpus->n_gpus; i++)
        if (is_shareable(&gpus->gpus[i]))
            return true;
    return false;
}

/* Why device memory goes through the host; "": it need not. */
static void judge(struct gpus *gpus)
{
    char *text = gpus->text;
    *text = '\0';
    if (is_missing(gpus->driver))
        snprintf(text, sizeof gpus->text, "%s", *gpus->driver ? gpus->driver + 2 : "no driver");
    else if (gpus->n_gpus == 0)
        snprintf(text, sizeof gpus->text, "the CUDA driver finds no GPU");
    else if (!is_any_shareable(gpus))
        snprintf(text, sizeof gpus->text,
                 "the compute mode of the GPUs lets no second process in (exclusive: MPS is "
                 "needed)");
    else if (is_missing(gpus->nccl))
        snprintf(text, sizeof gpus->text, "%s", *gpus->nccl ? gpus->nccl + 2 : "no NCCL");
    gpus->device_path = !*text;
}

bool gpus_parse(struct gpus *gpus, char *output)
{
    char *rest = output, *line;
    while ((line = strsep(&rest, "\n"))) {
        if (strcmp(line, "end") == 0) {
            judge(gpus);
            return true;
        }
        if (!take(line, "driver", gpus->driver, sizeof gpus->driver) &&
            !take(line, "nccl", gpus->nccl, sizeof gpus->nccl) &&
            !take(line, "kernels", gpus->kernels, sizeof gpus->kernels))
            take_gpu(gpus, line);
    }
    return false;
}

/* ------------------------------------------------------------------ asking */

static void let_go(struct gpus *gpus)
{
    watch_free(gpus->output_watch);
    watch_free(gpus->limit);
    gpus->output_watch = gpus->limit = NULL;
    if (gpus->fd >= 0)
        close(gpus->fd);
    gpus->fd = -1;
}

static void finish(struct gpus *gpus, const char *trouble)
{
    let_go(gpus);
    gpus->output[gpus->used] = '\0';
    if (!trouble && gpus_parse(gpus, gpus->output)) {
        if (gpus->device_path)
            log_info("gpus", "driver %s, NCCL %s, %u GPU%s", gpus->driver, gpus->nccl, gpus->n_gpus,
                     words_s(gpus->n_gpus));
        else
            log_info("gpus", "device memory goes through the host: %s", gpus->text);
    } else {
        gpus->n_gpus = 0;
        snprintf(gpus->text, sizeof gpus->text, "gradd-worker --gpus %s",
                 trouble ? trouble : "ended before it had told everything");
        log_warning("gpus", "%s: device memory goes through the host", gpus->text);
    }
    gpus->is_done = true;
    if (gpus->on_done)
        gpus->on_done(gpus->owner);
}

static void on_output(void *data, int fd, unsigned events)
{
    (void)events;
    struct gpus *gpus = data;
    size_t room = sizeof gpus->output - 1 - gpus->used;
    ssize_t n = read(fd, gpus->output + gpus->used, room);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    gpus->used += n > 0 ? (size_t)n : 0;
    if (n <= 0 || gpus->used == sizeof gpus->output - 1)
        finish(gpus, NULL);
}

static void on_limit(void *data)
{
    struct gpus *gpus = data;
    if (gpus->pid > 0)
        kill(gpus->pid, SIGKILL);
    finish(gpus, "did not end in 10 s and was killed");
}

void gpus_start(struct gpus *gpus, struct loop *loop, const char *worker_program,
                void (*on_done)(void *owner), void *owner)
{
    int ends[2] = {-1, -1};
    gpus->loop = loop;
    gpus->fd = -1;
    gpus->on_done = on_done;
    gpus->owner = owner;
    if (pipe2(ends, O_CLOEXEC) < 0) {
        finish(gpus, strerror(errno));
        return;
    }
    const struct worker_spawn spawn = {
        .program = worker_program, .channel = ends[1], .option = "--gpus"};
    pid_t pid = worker_spawn(&spawn);
    close(ends[1]);
    gpus->fd = ends[0];
    gpus->pid = pid > 0 ? pid : 0;
    fcntl(gpus->fd, F_SETFL, O_NONBLOCK);
    gpus->limit = watch_timer(loop, on_limit, gpus);
    gpus->output_watch = watch_fd(loop, gpus->fd, WATCH_READ, on_output, gpus);
    if (pid < 0 || !gpus->limit || !gpus->output_watch)
        finish(gpus, "could not be started");
    else
        watch_arm(gpus->limit, LIMIT_NS);
}

void gpus_skip(struct gpus *gpus, const char *why)
{
    gpus->fd = -1;
    gpus->is_done = true;
    snprintf(gpus->text, sizeof gpus->text, "%s", why);
}

void gpus_reap(struct gpus *gpus)
{
    if (gpus->pid > 0 && waitpid(gpus->pid, NULL, WNOHANG) == gpus->pid)
        gpus->pid = 0;
}

void gpus_stop(struct gpus *gpus)
{
    if (gpus->loop)
        let_go(gpus);
    if (gpus->pid > 0) {
        /* Not waited for: a driver that hangs can not be killed. */
        kill(gpus->pid, SIGKILL);
        gpus_reap(gpus);
        gpus->pid = 0;
    }
}
