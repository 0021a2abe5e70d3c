/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl version: this program's version, and the daemon's if one answers. */
#include "command.h"

static int run(struct context *context)
{
    struct writer *w = context->writer;
    writer_field(w, "gradctl", "gradctl", value_text(GRADD_VERSION));
    writer_field(w, "gradctl_protocol_min", "its protocol from", value_count(WIRE_PROTOCOL_MIN));
    writer_field(w, "gradctl_protocol_max", "to", value_count(WIRE_PROTOCOL_MAX));
    if (context->link->fd < 0)
        return LINK_OK;
    Pb__VersionRequest body = PB__VERSION_REQUEST__INIT;
    const Pb__Envelope *reply;
    int result = link_request(context->link, PB__ENVELOPE__BODY_VERSION_REQUEST, &body,
                              PB__ENVELOPE__BODY_VERSION_REPLY, &reply);
    if (result != LINK_OK)
        return result;
    const Pb__VersionReply *v = reply->version_reply;
    writer_field(w, "daemon", "daemon", value_text(v->version));
    writer_field(w, "daemon_protocol_min", "its protocol from", value_count(v->protocol_min));
    writer_field(w, "daemon_protocol_max", "to", value_count(v->protocol_max));
    writer_field(w, "features", "features", value_text(v->features));
    writer_field(w, "protocol", "agreed protocol", value_count(context->link->protocol));
    return LINK_OK;
}

const struct command command_version = {
    .name = "version",
    .help = "this program's version and the daemon's",
    .is_offline = true,
    .run = run,
};
