/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker with two members who lie. The daemon's side is honest; each member has registered one
 * region, so that submissions reach the plan and the backend.
 *
 * A record's `who`: bit 0 the member, bit 1 raw bytes instead of a frame, bit 2 let the loop turn
 * first, bit 3 the frame carries a descriptor, of a sealed page as queues in flag order have it.
 *
 * The worker takes device memory where a driver is found: see tests/fakes.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/log.h"
#include "base/loop.h"
#include "records.h"
#include "wire.h"
#include "worker/worker.h"

enum { N_MEMBERS = 2, REGION_BYTES = 64 * 1024, TURNS = 4 };

const char *__asan_default_options(void);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct scene {
    struct loop *loop;
    struct worker *worker;
    int daemon, member[N_MEMBERS]; /* the fuzzer's ends */
};

static void pair(int ends[2])
{
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        abort();
}

static void say(int socket, Pb__Envelope__BodyCase body_case, void *body, int fd)
{
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.hello = body; /* the members of the union are all pointers */
    struct wire_out out;
    wire_out_init(&out, WIRE_FRAME_MAX);
    if (wire_out_push(&out, &envelope, &fd, fd >= 0) < 0 || wire_out_flush(&out, socket) < 0)
        abort();
    wire_out_deinit(&out);
}

static void turn(struct scene *scene)
{
    for (int i = 0; i < TURNS; i++)
        loop_step(scene->loop, false);
    drain_socket(scene->daemon);
    for (int i = 0; i < N_MEMBERS; i++)
        drain_socket(scene->member[i]);
}

static void add_member(struct scene *scene, uint32_t rank)
{
    int ends[2];
    pair(ends);
    Pb__AddMember add = PB__ADD_MEMBER__INIT;
    add.epoch = 1;
    add.rank = add.local_rank = rank;
    add.pid = (int32_t)(1000 + rank);
    say(scene->daemon, PB__ENVELOPE__BODY_ADD_MEMBER, &add, ends[0]);
    close(ends[0]);
    scene->member[rank] = ends[1];
    int memory = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0 || ftruncate(memory, REGION_BYTES) < 0 ||
        fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
        abort();
    Pb__Register request = PB__REGISTER__INIT;
    request.region = 1;
    request.bytes = REGION_BYTES;
    say(ends[1], PB__ENVELOPE__BODY_REGISTER, &request, memory);
    close(memory);
}

static void open_scene(struct scene *scene)
{
    int ends[2];
    pair(ends);
    scene->daemon = ends[1];
    scene->loop = loop_new();
    scene->worker = scene->loop ? worker_new(scene->loop, ends[0]) : NULL;
    if (!scene->worker)
        abort();
    Pb__Configure configure = PB__CONFIGURE__INIT;
    configure.job = (char *)"fuzz";
    configure.node = (char *)"node";
    configure.threads = 1;
    configure.stall_warn_ms = 1;
    configure.op_timeout_ms = 5;
    configure.memory_bytes = 4 * REGION_BYTES;
    configure.fusion_bytes = 4096;
    configure.max_in_flight = 16;
    configure.log_level = (char *)"error";
    configure.device_path = true;
    configure.traffic_class = -1;
    say(scene->daemon, PB__ENVELOPE__BODY_CONFIGURE, &configure, -1);
    Pb__EpochBegin begin = PB__EPOCH_BEGIN__INIT;
    begin.epoch = 1;
    begin.size = begin.n_local = N_MEMBERS;
    say(scene->daemon, PB__ENVELOPE__BODY_EPOCH_BEGIN, &begin, -1);
    for (uint32_t i = 0; i < N_MEMBERS; i++)
        add_member(scene, i);
    turn(scene);
    turn(scene);
}

static void close_scene(struct scene *scene)
{
    worker_free(scene->worker);
    loop_free(scene->loop);
    close(scene->daemon);
    for (int i = 0; i < N_MEMBERS; i++)
        close(scene->member[i]);
}

static void send_page(int socket, const struct record *record)
{
    int page = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (page < 0 || ftruncate(page, 4096) < 0 || fcntl(page, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
        abort();
    send_frame_fd(socket, record->bytes, record->n, page);
    close(page);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct scene scene;
    struct record record;
    open_scene(&scene);
    while (record_next(&data, &size, &record)) {
        int socket = scene.member[record.who & 1];
        if (record.who & 4)
            turn(&scene);
        if (record.who & 2)
            (void)send(socket, record.bytes, record.n, MSG_DONTWAIT | MSG_NOSIGNAL);
        else if (record.who & 8)
            send_page(socket, &record);
        else
            send_frame(socket, record.bytes, record.n);
    }
    turn(&scene);
    Pb__StatsRequest request = PB__STATS_REQUEST__INIT;
    say(scene.daemon, PB__ENVELOPE__BODY_STATS_REQUEST, &request, -1);
    turn(&scene);
    close_scene(&scene);
    return 0;
}
