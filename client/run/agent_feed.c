/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is piped into gradrun, on its last way to rank 0. The launcher sends one piece and waits
 * until rank 0 has taken it, so that nothing piles up here.
 */
#include <fcntl.h>
#include <unistd.h>

#include "agent_state.h"

/* Write what rank 0 takes, and ask for more when it has all. */
void agent_feed(struct launch *l)
{
    struct agent *agent = l->owner;
    struct feed *f = &agent->feed;
    l->feed_fd = -1;
    if (!f->is_open)
        return;
    sink_flush(&f->to); /* a rank that does not read any more has all it wants */
    if (!sink_is_empty(&f->to)) {
        l->feed_fd = f->to.fd;
        return;
    }
    if (f->is_owed)
        agent_send(agent, &(struct message){.kind = FRAME_TAKEN});
    f->is_owed = false;
    if (f->is_last) {
        sink_deinit(&f->to);
        f->is_open = false;
    }
}

void agent_take_input(struct launch *l, const struct message *m)
{
    struct feed *f = &((struct agent *)l->owner)->feed;
    if (!f->is_open || f->is_owed)
        return;
    f->is_owed = true;
    f->is_last = m->text_bytes == 0;
    sink_push_bytes(&f->to, m->text, m->text_bytes);
    agent_feed(l);
}

/* Rank 0 gets a pipe for what ranks_start() hands on to it: our standard input. */
void agent_open_feed(struct agent *agent)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return;
    if (dup2(ends[0], 0) == 0) {
        sink_init_own(&agent->feed.to, ends[1]);
        agent->feed.is_open = true;
    } else {
        close(ends[1]);
    }
    close(ends[0]);
}

/* Rank 0 has its end: ours would keep the pipe alive after it. */
void agent_leave_feed(void)
{
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null >= 0) {
        dup2(null, 0);
        close(null);
    }
}
