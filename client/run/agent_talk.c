/* SPDX-License-Identifier: Apache-2.0 */
/* How an agent speaks to its launcher, and waits for it while it does nothing else. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "agent_state.h"

enum { SENTENCE_MAX = 4000 };

void agent_send(struct agent *agent, const struct message *message)
{
    /* A message that is too long, or has no memory, is lost; the launcher would wait for it, so
     * the conversation ends with it. */
    if (frame_put_message(&agent->writer, message) < 0 ||
        !sink_push_bytes(agent->launch.console.out, agent->writer.data, agent->writer.n))
        agent->launch.console.out->error = ENOMEM;
}

void agent_send_text(struct agent *agent, struct message message, const char *text)
{
    size_t length = strlen(text);
    message.text = text;
    message.text_bytes = length < SENTENCE_MAX ? length : SENTENCE_MAX;
    agent_send(agent, &message);
}

void agent_answer_ping(struct agent *agent)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    agent_send(agent, &(struct message){.kind = FRAME_PONG,
                                        .seconds = (uint32_t)now.tv_sec,
                                        .nanoseconds = (uint32_t)now.tv_nsec});
}

void agent_flush(struct agent *agent)
{
    struct sink *out = agent->launch.console.out;
    while (sink_flush(out) == 0 && !sink_is_empty(out)) {
        struct pollfd p = {out->fd, POLLOUT, 0};
        if (poll(&p, 1, AGENT_SILENCE_S * 1000) == 0)
            return;
    }
}

bool agent_wait(struct agent *agent, struct frame *out)
{
    for (;;) {
        int rc = inbox_next(&agent->inbox, out);
        if (rc != 0)
            return rc > 0;
        agent_flush(agent);
        struct pollfd p = {agent->inbox.fd, POLLIN, 0};
        if (poll(&p, 1, AGENT_SILENCE_S * 1000) == 0 || inbox_read(&agent->inbox) < 0)
            return false;
    }
}
