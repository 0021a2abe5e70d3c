/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_nccl.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

const struct nccl_table *nccl;

static struct {
    int rank;
    const char *variable, *value;
} settings[8];
static int n_settings;

void ranks_set(int rank, const char *variable, const char *value)
{
    settings[n_settings].rank = rank;
    settings[n_settings].variable = variable;
    settings[n_settings++].value = value;
}

void rank_open(struct rank *self, int device)
{
    const char *why = "";

    driver_open(device);
    nccl = nccl_table_open(&why);
    holds(nccl != NULL, why, __LINE__);
    OK(cu.cuStreamCreateWithPriority(&self->stream, CU_STREAM_NON_BLOCKING, 0));
}

ncclConfig_t config_of(int blocking)
{
    ncclConfig_t config = nccl_abi_config();

    config.blocking = blocking;
    return config;
}

ncclResult_t rank_poll(ncclComm_t comm)
{
    ncclResult_t rc = ncclInProgress;

    while (rc == ncclInProgress) {
        NOK(nccl->comm_async_error(comm, &rc));
        if (rc == ncclInProgress)
            usleep(500);
    }
    return rc;
}

void rank_join(struct rank *self, int blocking)
{
    ncclConfig_t config = config_of(blocking);

    rank_open(self, self->rank);
    if (blocking) {
        NOK(nccl->comm_init(&self->comm, self->n_ranks, self->id, self->rank, &config));
        return;
    }
    NGIVES(ncclInProgress,
           nccl->comm_init(&self->comm, self->n_ranks, self->id, self->rank, &config));
    NOK(rank_poll(self->comm));
}

float *floats_new(size_t n, float value, float step)
{
    CUdeviceptr p;
    float *view;

    OK(cu.cuMemAlloc_v2(&p, n * sizeof(float)));
    view = cu.view((const void *)(uintptr_t)p, n * sizeof(float));
    HOLDS(view != NULL);
    for (size_t i = 0; i < n; i++)
        view[i] = value + (float)i * step;
    return (float *)(uintptr_t)p;
}

const float *floats_of(struct rank *self, const float *device, size_t n)
{
    OK(cu.cuStreamSynchronize(self->stream));
    return cu.view(device, n * sizeof(float));
}

static void make_ids(int fd)
{
    const char *why = "";
    ncclUniqueId ids[2];

    nccl = nccl_table_open(&why);
    holds(nccl != NULL, why, __LINE__);
    NOK(nccl->get_unique_id(&ids[0]));
    NOK(nccl->get_unique_id(&ids[1]));
    put(fd, ids, sizeof(ids));
}

struct outcomes ranks_start(int n, void (*run)(struct rank *self))
{
    struct outcomes outcomes = {.n = n};
    struct peer peer = peer_start(make_ids);
    ncclUniqueId ids[2];
    int fds[2];

    take(peer.fd, ids, sizeof(ids));
    peer_end(peer);
    HOLDS(pipe2(fds, O_CLOEXEC) == 0);
    for (int i = 0; i < n; i++) {
        struct rank self = {.rank = i, .n_ranks = n, .id = ids[0], .other_id = ids[1]};
        int pair[2];
        pid_t pid;

        HOLDS(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
            dup2(fds[1], 2);
            close(pair[0]);
            self.fd = pair[1];
            for (int j = 0; j < n_settings; j++)
                if (settings[j].rank == i || settings[j].rank < 0)
                    setenv(settings[j].variable, settings[j].value, 1);
            driver_in_child();
            run(&self);
            _exit(0);
        }
        close(pair[1]);
        outcomes.ranks[i] = (struct outcome){.pid = pid, .fd = pair[0]};
    }
    close(fds[1]);
    outcomes.stderr_fd = fds[0];
    return outcomes;
}

/* What one of them writes to stderr, until all have closed it, or until the words came. */
static void read_stderr(struct outcomes *outcomes, const char *words)
{
    size_t n = strlen(outcomes->text);
    ssize_t got;

    while (!(words && strstr(outcomes->text, words)) && n < sizeof(outcomes->text) - 1 &&
           (got = read(outcomes->stderr_fd, outcomes->text + n, sizeof(outcomes->text) - 1 - n)) >
               0)
        outcomes->text[n += (size_t)got] = '\0';
}

void ranks_wait(struct outcomes *outcomes)
{
    read_stderr(outcomes, NULL);
    close(outcomes->stderr_fd);
    for (int i = 0; i < outcomes->n; i++) {
        close(outcomes->ranks[i].fd);
        HOLDS(waitpid(outcomes->ranks[i].pid, &outcomes->ranks[i].status, 0) ==
              outcomes->ranks[i].pid);
    }
}

void ranks_succeed(int n, void (*run)(struct rank *self))
{
    struct outcomes outcomes = ranks_start(n, run);

    ranks_wait(&outcomes);
    for (int i = 0; i < n; i++)
        ck_assert_msg(outcomes.ranks[i].status == 0, "rank %d: status %#x, stderr: %s", i,
                      (unsigned)outcomes.ranks[i].status, outcomes.text);
}

void ranks_die(int n, void (*run)(struct rank *self), const char *words)
{
    struct outcomes outcomes = ranks_start(n, run);
    int status;

    read_stderr(&outcomes, words);
    ck_assert_msg(strstr(outcomes.text, "fake libnccl: ") && strstr(outcomes.text, words),
                  "stderr: %s", outcomes.text);
    /* One is dying of it: that one is awaited, the others may wait for it in vain. */
    do
        HOLDS(waitpid(-1, &status, 0) > 0);
    while (!(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT));
    for (int i = 0; i < n; i++)
        kill(outcomes.ranks[i].pid, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0)
        ;
}
