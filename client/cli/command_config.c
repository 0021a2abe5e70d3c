/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl config: the options that the daemon runs with, and where each came from. */
#include "command.h"

static const struct column columns[] = {
    {"section", "SECTION"}, {"key", "KEY"},       {"value", "VALUE"},
    {"default", "DEFAULT"}, {"source", "SOURCE"}, {"reloadable", "RELOADABLE"},
    {"doc", "MEANING"},
};

static int run(struct context *context)
{
    Pb__ConfigRequest body = PB__CONFIG_REQUEST__INIT;
    const Pb__Envelope *reply;
    int result = link_request(context->link, PB__ENVELOPE__BODY_CONFIG_REQUEST, &body,
                              PB__ENVELOPE__BODY_CONFIG_REPLY, &reply);
    if (result != LINK_OK)
        return result;
    const Pb__ConfigReply *config = reply->config_reply;
    struct writer *w = context->writer;
    writer_table_begin(w, "options", NULL, columns, sizeof columns / sizeof columns[0]);
    for (size_t i = 0; i < config->n_options; i++) {
        const Pb__ConfigOption *o = config->options[i];
        const struct value values[] = {
            value_text(o->section),       value_text(o->key),    value_text(o->value),
            value_text(o->default_value), value_text(o->source), value_bool(o->reloadable),
            value_text(o->doc),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
    return LINK_OK;
}

const struct command command_config = {
    .name = "config",
    .help = "the daemon's options and where each came from",
    .run = run,
};
