/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors for people: one sentence per thread, and the names of statuses.
 *
 * Invariant: the sentence lies in the thread's own storage, so no other thread and no freed context
 * can change it under the reader.
 */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

#include <gradd/gradd.h>

static _Thread_local char sentence[ERROR_TEXT_BYTES];

int error_keep(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return 0;
}

int error_status_from_wire(unsigned code)
{
    if (code > (unsigned)-GRADD_ERR_INTERNAL)
        return GRADD_ERR_INTERNAL;
    return -(int)code;
}

const char *gradd_error(void)
{
    return sentence;
}

const char *gradd_status_name(int status)
{
    switch (status) {
    case GRADD_OK:
        return "GRADD_OK";
    case GRADD_PENDING:
        return "GRADD_PENDING";
    case GRADD_ERR_INVALID:
        return "GRADD_ERR_INVALID";
    case GRADD_ERR_DISAGREE:
        return "GRADD_ERR_DISAGREE";
    case GRADD_ERR_RANK_LOST:
        return "GRADD_ERR_RANK_LOST";
    case GRADD_ERR_TIMEOUT:
        return "GRADD_ERR_TIMEOUT";
    case GRADD_ERR_UNAVAILABLE:
        return "GRADD_ERR_UNAVAILABLE";
    case GRADD_ERR_NO_MEMORY:
        return "GRADD_ERR_NO_MEMORY";
    case GRADD_ERR_PROTOCOL:
        return "GRADD_ERR_PROTOCOL";
    case GRADD_ERR_DENIED:
        return "GRADD_ERR_DENIED";
    case GRADD_ERR_SHUTDOWN:
        return "GRADD_ERR_SHUTDOWN";
    case GRADD_ERR_FORKED:
        return "GRADD_ERR_FORKED";
    case GRADD_ERR_DUPLICATE:
        return "GRADD_ERR_DUPLICATE";
    case GRADD_ERR_UNSUPPORTED:
        return "GRADD_ERR_UNSUPPORTED";
    case GRADD_ERR_INTERNAL:
        return "GRADD_ERR_INTERNAL";
    default:
        return "(no gradd status)";
    }
}
