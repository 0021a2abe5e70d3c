/* SPDX-License-Identifier: Apache-2.0 */
#include "peers_rig.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "run_suite.h"

struct loop *loop;
struct node a, b;

static void on_up(void *owner, struct peer_link *link)
{
    struct node *node = owner;
    node->n_up++;
    node->up = link;
}

static void on_lost(void *owner, struct peer_link *link, const char *why)
{
    struct node *node = owner;
    node->n_lost++;
    if (node->up == link)
        node->up = NULL;
    snprintf(node->why, sizeof node->why, "%s", why);
}

static void on_self(void *owner, struct peer_link *link)
{
    (void)link;
    ((struct node *)owner)->n_self++;
}

static void on_answer(void *owner, struct peer_link *link)
{
    (void)link;
    ((struct node *)owner)->n_answers++;
}

static void on_message(void *owner, struct peer_link *link, const Pb__Envelope *envelope)
{
    struct node *node = owner;
    (void)link;
    node->n_messages++;
    if (envelope->body_case == PB__ENVELOPE__BODY_REMOTE_LEAVE)
        node->last_epoch = envelope->remote_leave->epoch;
}

static bool is_used(void *owner, const struct peer_link *link)
{
    (void)link;
    return ((struct node *)owner)->is_used;
}

static const uint8_t *find_secret(void *owner, const struct link_hello *hello)
{
    struct node *node = owner;
    return node->has_epoch && hello->epoch == 3 ? node->secret : NULL;
}

static void on_data_link(void *owner, const struct link_hello *hello, int fd)
{
    struct node *node = owner;
    ck_assert_uint_eq(hello->epoch, 3);
    node->n_data++;
    node->data_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
}

const struct peers_ops node_ops = {
    .on_up = on_up,
    .on_lost = on_lost,
    .on_self = on_self,
    .on_answer = on_answer,
    .on_message = on_message,
    .is_used = is_used,
    .find_secret = find_secret,
    .on_data_link = on_data_link,
};

void node_start_on(struct node *node, const char *name, uint8_t key, const char *host,
                   uint16_t port)
{
    memset(node, 0, sizeof *node);
    config_init(&node->config);
    node->config.peer_port = port;
    snprintf(node->config.peer_address, sizeof node->config.peer_address, "%s", host);
    node->config.peer_heartbeat_ms = 50;
    node->config.peer_dead_ms = 300;
    node->is_used = true;
    node->data_fd = -1;
    memset(node->secret, 9, sizeof node->secret);
    node->peers.loop = loop;
    node->peers.config = &node->config;
    node->peers.node = name;
    node->peers.ops = &node_ops;
    node->peers.owner = node;
    node->peers.key.is_set = key != 0;
    memset(node->peers.key.key, key, sizeof node->peers.key.key);
    ck_assert_int_eq(peers_start(&node->peers, true, -1), 0);
}

void node_start_at(struct node *node, const char *name, uint8_t key, uint16_t port)
{
    node_start_on(node, name, key, "127.0.0.1", port);
}

void node_start(struct node *node, const char *name, uint8_t key)
{
    node_start_at(node, name, key, 0);
}

void rig_set_up(void)
{
    signal(SIGPIPE, SIG_IGN);
    log_init("test", LOG_LEVEL_ERROR);
    loop = loop_new();
    node_start(&a, "a", 1);
    node_start(&b, "b", 1);
}

void node_stop(struct node *node)
{
    peers_stop(&node->peers);
    if (node->data_fd >= 0)
        close(node->data_fd);
}

void rig_tear_down(void)
{
    node_stop(&a);
    node_stop(&b);
    loop_free(loop);
}

struct resolved node_address(const struct node *node)
{
    return (struct resolved){.n_addresses = 1, .addresses = {node->peers.listening}};
}

struct peer_link *node_dial(struct node *from, const struct node *to)
{
    char error[256];
    struct resolved target = node_address(to);
    struct peer_link *link = peers_dial(&from->peers, &target, error, sizeof error);
    ck_assert_msg(link, "%s", error);
    return link;
}

void push_leave(struct peer_link *link, uint64_t epoch)
{
    Pb__RemoteLeave leave = PB__REMOTE_LEAVE__INIT;
    leave.epoch = epoch;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_REMOTE_LEAVE;
    envelope.remote_leave = &leave;
    peer_link_push(link, &envelope);
}

int node_visit(const struct node *node)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct peer_address *address = &node->peers.listening;
    ck_assert_int_eq(connect(fd, (const struct sockaddr *)&address->socket, address->bytes), 0);
    return fd;
}

void await_close(int fd)
{
    char byte;
    ssize_t n;
    while ((n = recv(fd, &byte, 1, MSG_DONTWAIT)) != 0 && (n > 0 || errno == EAGAIN))
        if (n < 0)
            loop_step(loop, true);
    close(fd);
}
