/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Three "nodes" in one process: an epoch each, real links over loopback (this test plays the
 * daemons that accept them), trainers that speak the protocol. Order, results and failures across
 * nodes.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <check.h>

#include "../proto/run_suite.h"
#include "base/link_proof.h"
#include "worker/backend/net/net.h"
#include "worker/central.h"
#include "worker/epoch.h"
#include "worker/mesh.h"

enum { NODES = 3, RANKS = 4, FLOATS = 50000 }; /* ranks 0 and 1 on node 0 */

static uint32_t node_of[RANKS] = {0, 0, 1, 2};

struct trainer {
    int fd;
    struct wire_in in;
    float *memory; /* FLOATS of input, then two outputs of FLOATS: ops under way share none */
    uint64_t n_done, n_failed;
    uint64_t counts[RANKS];
    uint64_t nonfinite; /* of nonfinite_rank, says the last completion */
    uint32_t nonfinite_rank;
    bool has_region, epoch_has_failed;
    char text[600];
};

struct node {
    struct epoch_setup setup;
    struct region_quota quota;
    struct epoch *epoch;
    int listener;
    uint16_t port;
    pthread_t acceptor;
    int arrivals[2];
    struct watch *watch;
    unsigned n_up, n_lost;
};

static struct loop *loop;
static struct chores *chores;
static struct node nodes[NODES];
static struct trainer trainers[RANKS];

/* ------------------------------------------------------------------ playing the daemon */

static struct layout *make_layout(uint32_t node_rank)
{
    struct layout *layout = layout_alloc(7, NODES, RANKS);
    ck_assert_ptr_nonnull(layout);
    layout->node_rank = node_rank;
    layout->ring_streams = 2;
    for (uint32_t i = 0; i < NODES; i++) {
        sprintf(layout->nodes[i].name, "n%u", i);
        strcpy(layout->nodes[i].address, "127.0.0.1");
        layout->nodes[i].port = nodes[i].port;
    }
    memcpy(layout->node_of, node_of, sizeof node_of);
    memset(layout->secret, 0x5a, sizeof layout->secret);
    memset(layout->link_id, 0x11, sizeof layout->link_id);
    return layout;
}

struct arrival {
    uint32_t from_node, stream;
    int fd;
};

/* The accepting side of the proof, on a thread: the connecting side answers from the loop. */
static void *accept_links(void *data)
{
    struct node *node = data;
    int conn;
    while ((conn = accept4(node->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
        uint8_t secret[32], hello[LINK_HELLO_BYTES], answer[LINK_ANSWER_BYTES];
        uint8_t proof[LINK_PROOF_BYTES], nonce[LINK_NONCE_BYTES] = {3};
        struct link_hello said;
        memset(secret, 0x5a, sizeof secret);
        if (recv(conn, hello, sizeof hello, MSG_WAITALL) != (ssize_t)sizeof hello ||
            link_hello_unpack(hello, &said) < 0 ||
            link_server_answer(secret, hello, nonce, answer) < 0 ||
            send(conn, answer, sizeof answer, 0) != (ssize_t)sizeof answer ||
            recv(conn, proof, sizeof proof, MSG_WAITALL) != (ssize_t)sizeof proof ||
            link_check_client(secret, hello, answer, proof) < 0)
            abort();
        const struct arrival arrival = {said.from_node, said.stream, conn};
        if (write(node->arrivals[1], &arrival, sizeof arrival) != (ssize_t)sizeof arrival)
            abort();
    }
    return NULL;
}

static void on_arrival(void *data, int fd, unsigned events)
{
    struct node *node = data;
    struct arrival arrival;
    (void)events;
    ck_assert_int_eq(read(fd, &arrival, sizeof arrival), (ssize_t)sizeof arrival);
    epoch_link_arrived(node->epoch, arrival.from_node, arrival.stream, arrival.fd);
}

static void on_member_gone(void *data, uint64_t epoch, const struct member *member, int status,
                           const char *text)
{
    (void)data, (void)epoch, (void)member, (void)status, (void)text;
}

static void on_stall(void *data, uint64_t epoch, uint32_t n_stalled, const char *text)
{
    (void)data, (void)epoch, (void)n_stalled, (void)text;
}

static void on_over(void *data)
{
    (void)data;
}

static void on_links_up(void *data, uint64_t epoch)
{
    (void)epoch;
    ((struct node *)data)->n_up++;
}

/* As the daemons do: the epoch fails on all nodes. */
static void on_link_lost(void *data, uint64_t epoch, uint32_t peer, const char *text)
{
    (void)epoch, (void)peer;
    ((struct node *)data)->n_lost++;
    for (int i = 0; i < NODES; i++)
        if (nodes[i].epoch)
            epoch_fail(nodes[i].epoch, GRADD_ERR_RANK_LOST, text, -1, 0);
}

static void listen_on_loopback(struct node *node)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    node->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(node->listener, (struct sockaddr *)&address, sizeof address), 0);
    ck_assert_int_eq(listen(node->listener, 64), 0);
    getsockname(node->listener, (struct sockaddr *)&address, &size);
    node->port = ntohs(address.sin_port);
    ck_assert_int_eq(pipe2(node->arrivals, O_CLOEXEC), 0);
    node->watch = watch_fd(loop, node->arrivals[0], WATCH_READ, on_arrival, node);
    ck_assert_int_eq(pthread_create(&node->acceptor, NULL, accept_links, node), 0);
}

/* ------------------------------------------------------------------ playing the trainers */

static void send_message(struct trainer *trainer, Pb__Envelope__BodyCase body_case, void *body,
                         int fd)
{
    struct wire_out out;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.register_ = body;
    wire_out_init(&out, 1 << 20);
    ck_assert_int_eq(wire_out_push(&out, &envelope, &fd, fd >= 0), 0);
    ck_assert_int_eq(wire_out_flush(&out, trainer->fd), 0);
    wire_out_deinit(&out);
}

static void take_completions(struct trainer *trainer, const Pb__CompletionBatch *batch)
{
    for (size_t i = 0; i < batch->n_completions; i++) {
        const Pb__Completion *completion = batch->completions[i];
        if (completion->code == 0)
            trainer->n_done++;
        else
            trainer->n_failed++;
        trainer->nonfinite = completion->nonfinite;
        trainer->nonfinite_rank = completion->nonfinite_rank;
        snprintf(trainer->text, sizeof trainer->text, "%s", completion->text);
        for (size_t k = 0; k < completion->n_counts && k < RANKS; k++)
            trainer->counts[k] = completion->counts[k];
    }
}

static void read_replies(struct trainer *trainer)
{
    struct wire_frame frame;
    wire_in_read(&trainer->in, trainer->fd);
    while (wire_in_next(&trainer->in, &frame) == 1) {
        if (frame.envelope->body_case == PB__ENVELOPE__BODY_COMPLETION_BATCH)
            take_completions(trainer, frame.envelope->completion_batch);
        else if (frame.envelope->body_case == PB__ENVELOPE__BODY_EPOCH_FAILED)
            trainer->epoch_has_failed = true;
        else if (frame.envelope->body_case == PB__ENVELOPE__BODY_REGION_REPLY)
            trainer->has_region = frame.envelope->region_reply->code == 0;
    }
}

/* Turn the loop until every trainer has so many ends. */
static void run_until(uint64_t n_ends)
{
    for (;;) {
        bool is_done = true;
        for (int r = 0; r < RANKS; r++) {
            read_replies(&trainers[r]);
            is_done &= trainers[r].n_done + trainers[r].n_failed >= n_ends;
        }
        if (is_done)
            return;
        loop_step(loop, true);
    }
}

static void submit_to(int rank, Pb__Submit *submit, uint64_t n_output)
{
    static uint64_t last_id;
    Pb__Buffer in = PB__BUFFER__INIT, out = PB__BUFFER__INIT;
    Pb__SubmitBatch batch = PB__SUBMIT_BATCH__INIT;
    in.region = out.region = 1;
    out.offset = (1 + n_output) * FLOATS * sizeof(float);
    submit->id = ++last_id;
    submit->in = &in;
    submit->out = &out;
    submit->ready = submit->count;
    batch.epoch = 7;
    batch.submits = &submit;
    batch.n_submits = 1;
    send_message(&trainers[rank], PB__ENVELOPE__BODY_SUBMIT_BATCH, &batch, -1);
}

static void submit(int rank, Pb__Submit *submit)
{
    submit_to(rank, submit, 0);
}

static Pb__Submit sum_of(const char *name, uint64_t count)
{
    Pb__Submit s = PB__SUBMIT__INIT;
    s.name = (char *)name;
    s.kind = GRADD_ALLREDUCE;
    s.dtype = GRADD_F32;
    s.count = count;
    return s;
}

static void open_trainer(int rank)
{
    struct trainer *trainer = &trainers[rank];
    struct node *node = &nodes[node_of[rank]];
    int ends[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    *trainer = (struct trainer){.fd = ends[0]};
    wire_in_init(&trainer->in);
    const struct epoch_member who = {.rank = (uint32_t)rank, .pid = getpid(), .source = "test"};
    ck_assert_int_eq(epoch_add_member(node->epoch, &who, ends[1]), 0);
    const size_t bytes = 3 * FLOATS * sizeof(float);
    int fd = memfd_create("nodes", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK);
    trainer->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    Pb__Register message = PB__REGISTER__INIT;
    message.region = 1;
    message.bytes = bytes;
    send_message(trainer, PB__ENVELOPE__BODY_REGISTER, &message, fd);
    close(fd);
    for (int i = 0; i < FLOATS; i++)
        trainer->memory[i] = (float)((rank + 1) * (i % 101));
}

static void setup(void)
{
    loop = loop_new();
    chores = chores_new(loop);
    for (uint32_t i = 0; i < NODES; i++) {
        nodes[i] = (struct node){.quota.limit_bytes = UINT64_MAX};
        listen_on_loopback(&nodes[i]);
    }
    for (uint32_t i = 0; i < NODES; i++) {
        struct node *node = &nodes[i];
        node->setup = (struct epoch_setup){
            .loop = loop,
            .chores = chores,
            .quota = &node->quota,
            .max_in_flight = 1000,
            .peer_dead_ns = 10000000000,
            .fusion_bytes = UINT64_MAX,
            .on_member_gone = on_member_gone,
            .on_stall = on_stall,
            .on_links_up = on_links_up,
            .on_link_lost = on_link_lost,
            .on_over = on_over,
            .data = node,
        };
        strcpy(node->setup.job, "t");
        sprintf(node->setup.node, "n%u", i);
        node->epoch = epoch_new(&node->setup, 7, RANKS, i == 0 ? 2 : 1, make_layout(i));
        ck_assert_ptr_nonnull(node->epoch);
    }
    for (int rank = 0; rank < RANKS; rank++)
        open_trainer(rank);
    while (nodes[0].n_up + nodes[1].n_up + nodes[2].n_up < NODES)
        loop_step(loop, true);
    for (int rank = 0; rank < RANKS; rank++) {
        for (read_replies(&trainers[rank]); !trainers[rank].has_region;
             read_replies(&trainers[rank]))
            loop_step(loop, true);
    }
}

/* The node's worker is gone, its connections with it. */
static void close_node(struct node *node)
{
    if (!node->epoch)
        return;
    epoch_retire(node->epoch);
    while (!epoch_is_idle(node->epoch))
        loop_step(loop, true);
    epoch_free(node->epoch);
    node->epoch = NULL;
}

static void teardown(void)
{
    for (int i = 0; i < NODES; i++) {
        close_node(&nodes[i]);
        shutdown(nodes[i].listener, SHUT_RDWR);
        pthread_join(nodes[i].acceptor, NULL);
        watch_free(nodes[i].watch);
        close(nodes[i].listener);
        close(nodes[i].arrivals[0]);
        close(nodes[i].arrivals[1]);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        wire_in_deinit(&trainers[rank].in);
        close(trainers[rank].fd);
        munmap(trainers[rank].memory, 3 * FLOATS * sizeof(float));
    }
    chores_free(chores);
    loop_free(loop);
    for (int i = 0; i < NODES; i++)
        ck_assert_uint_eq(nodes[i].quota.used_bytes, 0);
}

static float *output(int rank)
{
    return trainers[rank].memory + FLOATS;
}

static void expect_sums(int rank, int count, int factor)
{
    for (int i = 0; i < count; i++)
        if (output(rank)[i] != (float)(factor * (i % 101)))
            ck_abort_msg("rank %d: element %d is %g, not %d", rank, i, (double)output(rank)[i],
                         factor * (i % 101));
}

START_TEST(every_rank_gets_the_sum_in_any_order_of_submission)
{
    setup();
    Pb__Submit a = sum_of("a", FLOATS), b = sum_of("b", 10);
    for (int rank = 0; rank < RANKS; rank++) {
        submit_to(rank, rank % 2 ? &a : &b, rank % 2 ? 0 : 1);
        submit_to(rank, rank % 2 ? &b : &a, rank % 2 ? 1 : 0);
    }
    run_until(2);
    for (int rank = 0; rank < RANKS; rank++) {
        ck_assert_uint_eq(trainers[rank].n_done, 2);
        expect_sums(rank, FLOATS, 1 + 2 + 3 + 4);
    }
    /* Names travel as ids now, and are free again. */
    for (int i = 0; i < 20; i++) {
        for (int rank = 0; rank < RANKS; rank++)
            submit(rank, &a);
        run_until(3 + (uint64_t)i);
    }
    for (int rank = 0; rank < RANKS; rank++)
        ck_assert_uint_eq(trainers[rank].n_failed, 0);
    teardown();
}
END_TEST

/* Bytes that have gone over data links. */
static uint64_t moved_bytes(void)
{
    uint64_t bytes = 0;
    for (int i = 0; i < NODES; i++) {
        struct net_link_stats stats[NODES];
        size_t n = net_stats(nodes[i].epoch->net, stats, NODES);
        for (size_t k = 0; k < n; k++)
            bytes += stats[k].sent_bytes;
    }
    return bytes;
}

START_TEST(small_sums_run_on_the_coordinator_alone)
{
    const int at_limit = CENTRAL_BYTES_MAX / (int)sizeof(float);
    setup();
    Pb__Submit small = sum_of("small", (uint64_t)at_limit), mean = sum_of("mean", 11);
    for (int i = 0; i < 3; i++) { /* the buffers are used again */
        for (int rank = 0; rank < RANKS; rank++)
            submit(rank, &small);
        run_until(1 + (uint64_t)i);
        for (int rank = 0; rank < RANKS; rank++) {
            expect_sums(rank, at_limit, 1 + 2 + 3 + 4);
            memset(output(rank), 0, CENTRAL_BYTES_MAX);
        }
    }
    mean.redop = GRADD_AVG;
    for (int rank = 0; rank < RANKS; rank++)
        submit(rank, &mean);
    run_until(4);
    for (int rank = 0; rank < RANKS; rank++)
        ck_assert(output(rank)[10] == 25);
    ck_assert_uint_eq(moved_bytes(), 0);

    Pb__Submit large = sum_of("large", (uint64_t)at_limit + 1);
    for (int rank = 0; rank < RANKS; rank++) {
        submit(rank, &large);
        submit_to(rank, &mean, 1);
    }
    run_until(6);
    for (int rank = 0; rank < RANKS; rank++)
        ck_assert_uint_eq(trainers[rank].n_done, 6);
    ck_assert_uint_gt(moved_bytes(), 0);
    teardown();
}
END_TEST

START_TEST(only_what_belongs_to_a_small_sum_is_accepted)
{
    uint8_t bytes[2 * CENTRAL_BYTES_MAX] = {0};
    Pb__RemoteSubmit submit = PB__REMOTE_SUBMIT__INIT;
    submit.kind = GRADD_ALLREDUCE;
    submit.dtype = GRADD_F32;
    submit.count = 3;
    submit.data = (ProtobufCBinaryData){0, bytes};
    ck_assert(central_accepts(&submit)); /* none */
    submit.data.len = 12;
    ck_assert(central_accepts(&submit));
    submit.is_device = true;
    ck_assert(!central_accepts(&submit));
    submit.is_device = false;
    submit.data.len = 13;
    ck_assert(!central_accepts(&submit));
    submit.data.len = 12;
    submit.kind = GRADD_BROADCAST;
    ck_assert(!central_accepts(&submit));
    submit.kind = GRADD_ALLREDUCE;
    submit.dtype = 99;
    ck_assert(!central_accepts(&submit));
    submit.dtype = GRADD_F32;
    submit.data.len = sizeof bytes;
    submit.count = sizeof bytes / sizeof(float);
    ck_assert(!central_accepts(&submit));
    submit.count = UINT64_C(1) << 62 | 3; /* times 4 is 12 */
    submit.data.len = 12;
    ck_assert(!central_accepts(&submit));
}
END_TEST

START_TEST(small_sums_are_offered_unless_they_must_be_rounded_hidden_or_checked)
{
    uint8_t memory[16];
    struct layout layout = {0};
    struct signature signature = {.kind = GRADD_ALLREDUCE, .dtype = GRADD_F32, .count = 4};
    struct request request = {.part.in.base = memory};
    ck_assert(central_offers(&layout, &signature, &request));
    layout.wire = GRADD_F16;
    ck_assert(!central_offers(&layout, &signature, &request));
    signature.dtype = GRADD_I32; /* travels as it is */
    ck_assert(central_offers(&layout, &signature, &request));
    layout.encrypt_data = true;
    ck_assert(!central_offers(&layout, &signature, &request));
    layout.encrypt_data = false;
    signature.is_device = true;
    ck_assert(!central_offers(&layout, &signature, &request));
    signature.is_device = false;
    request.check_finite = true;
    ck_assert(!central_offers(&layout, &signature, &request));
}
END_TEST

/* Ranks that do not ask have offered their inputs to the coordinator, which does not count them. */
START_TEST(nan_is_found_where_it_is_also_when_some_ranks_do_not_ask)
{
    static const uint32_t mixed[RANKS] = {0, 1, 0, 2}, before[RANKS] = {0, 0, 1, 2};
    memcpy(node_of, mixed, sizeof node_of);
    setup();
    trainers[2].memory[3] = NAN;
    for (int rank = 0; rank < RANKS; rank++) {
        Pb__Submit s = sum_of("a", 10);
        s.check_finite = rank != 1;
        submit(rank, &s);
    }
    run_until(1);
    for (int rank = 0; rank < RANKS; rank++) {
        ck_assert_uint_eq(trainers[rank].n_done, 1);
        ck_assert_uint_eq(trainers[rank].nonfinite, 1);
        ck_assert_uint_eq(trainers[rank].nonfinite_rank, 2);
    }
    teardown();
    memcpy(node_of, before, sizeof node_of);
}
END_TEST

/* The other side has lost the first one and came again. */
START_TEST(a_second_connection_is_watched_by_the_kernel_like_the_first)
{
    static const struct mesh_ops ops;
    const uint64_t dead_ns = 3000000000;
    loop = loop_new();
    struct layout *layout = layout_alloc(7, 2, 2);
    layout->node_rank = 1;
    layout->ring_streams = 1;
    struct mesh *mesh = mesh_new(loop, layout, dead_ns, &ops, NULL);
    ck_assert_ptr_nonnull(mesh);
    for (int i = 0; i < 2; i++)
        mesh_arrived(mesh, 0, 0, socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int fd = mesh_take(mesh, 0, 0), dead_ms = 0;
    socklen_t size = sizeof dead_ms;
    ck_assert_int_eq(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &dead_ms, &size), 0);
    ck_assert_int_eq(dead_ms, 3000);
    close(fd);
    mesh_free(mesh);
    layout_free(layout);
    loop_free(loop);
}
END_TEST

START_TEST(disagreement_is_told_on_every_node_and_names_both_sides)
{
    setup();
    Pb__Submit right = sum_of("w", 10), wrong = sum_of("w", 11);
    for (int rank = 0; rank < RANKS; rank++)
        submit(rank, rank == 3 ? &wrong : &right);
    run_until(1);
    for (int rank = 0; rank < RANKS; rank++) {
        ck_assert_uint_eq(trainers[rank].n_failed, 1);
        ck_assert_ptr_nonnull(strstr(trainers[rank].text, "rank 3 (node n2"));
        ck_assert_ptr_nonnull(strstr(trainers[rank].text, "float32[11]"));
        ck_assert_ptr_nonnull(strstr(trainers[rank].text, "float32[10]"));
    }
    for (int rank = 0; rank < RANKS; rank++)
        submit(rank, &right);
    run_until(2);
    for (int rank = 0; rank < RANKS; rank++)
        ck_assert_uint_eq(trainers[rank].n_done, 1);
    teardown();
}
END_TEST

START_TEST(process_set_spans_nodes)
{
    uint64_t ranks[] = {1, 3};
    setup();
    Pb__Submit add = PB__SUBMIT__INIT, sum = sum_of("s", 100);
    add.name = (char *)"set";
    add.kind = GRADD_SET_ADD;
    add.counts = ranks;
    add.n_counts = 2;
    for (int rank = 0; rank < RANKS; rank++)
        submit(rank, &add);
    run_until(1);
    for (int rank = 0; rank < RANKS; rank++)
        ck_assert_uint_eq(trainers[rank].counts[0], 1);
    sum.set = 1;
    submit(3, &sum);
    submit(1, &sum);
    sum.set = 0;
    submit(0, &sum);
    submit(2, &sum);
    submit(1, &sum);
    submit(3, &sum);
    run_until(2);
    for (int rank = 1; rank < RANKS; rank += 2)
        while (trainers[rank].n_done < 3) {
            loop_step(loop, true);
            read_replies(&trainers[rank]);
        }
    expect_sums(0, 100, 1 + 2 + 3 + 4);
    teardown();
}
END_TEST

START_TEST(all_to_all_tells_what_came_from_whom)
{
    uint64_t counts[RANKS][RANKS] = {{1, 2, 3, 4}, {0, 0, 0, 5}, {7, 0, 1, 0}, {2, 2, 2, 2}};
    setup();
    for (int rank = 0; rank < RANKS; rank++) {
        Pb__Submit s = sum_of("t", 0);
        s.kind = GRADD_ALLTOALL;
        s.counts = counts[rank];
        s.n_counts = RANKS;
        for (int i = 0; i < RANKS; i++)
            s.count += counts[rank][i];
        s.out_capacity = 100;
        submit(rank, &s);
    }
    run_until(1);
    for (int to = 0; to < RANKS; to++) {
        const float *at = output(to);
        for (int from = 0; from < RANKS; from++) {
            uint64_t skip = 0;
            for (int i = 0; i < to; i++)
                skip += counts[from][i];
            ck_assert_uint_eq(trainers[to].counts[from], counts[from][to]);
            for (uint64_t i = 0; i < counts[from][to]; i++)
                ck_assert(*at++ == trainers[from].memory[skip + i]);
        }
    }
    teardown();
}
END_TEST

START_TEST(rank_that_leaves_fails_what_needs_it)
{
    setup();
    Pb__Submit s = sum_of("a", 10);
    Pb__Leave leave = PB__LEAVE__INIT;
    send_message(&trainers[2], PB__ENVELOPE__BODY_LEAVE, &leave, -1);
    trainers[2].n_failed = 1; /* it gets no answer */
    for (int rank = 0; rank < RANKS; rank++)
        if (rank != 2)
            submit(rank, &s);
    run_until(1);
    for (int rank = 0; rank < RANKS; rank++)
        if (rank != 2)
            ck_assert_ptr_nonnull(strstr(trainers[rank].text, "rank 2"));
    ck_assert_uint_eq(nodes[0].n_lost + nodes[1].n_lost + nodes[2].n_lost, 0);
    teardown();
}
END_TEST

START_TEST(lost_node_fails_the_epoch_everywhere)
{
    setup();
    Pb__Submit s = sum_of("a", FLOATS);
    for (int rank = 0; rank < 3; rank++)
        submit(rank, &s);
    close_node(&nodes[2]);
    trainers[3].n_failed = 1;
    run_until(1);
    for (int rank = 0; rank < 3; rank++)
        while (!trainers[rank].epoch_has_failed) {
            loop_step(loop, true);
            read_replies(&trainers[rank]);
        }
    ck_assert_uint_ge(nodes[0].n_lost + nodes[1].n_lost, 1);
    teardown();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        every_rank_gets_the_sum_in_any_order_of_submission,
        small_sums_run_on_the_coordinator_alone,
        only_what_belongs_to_a_small_sum_is_accepted,
        small_sums_are_offered_unless_they_must_be_rounded_hidden_or_checked,
        nan_is_found_where_it_is_also_when_some_ranks_do_not_ask,
        a_second_connection_is_watched_by_the_kernel_like_the_first,
        disagreement_is_told_on_every_node_and_names_both_sides,
        process_set_spans_nodes,
        all_to_all_tells_what_came_from_whom,
        rank_that_leaves_fails_what_needs_it,
        lost_node_fails_the_epoch_everywhere,
    };
    return run_suite("nodes", tests, sizeof tests / sizeof *tests);
}
