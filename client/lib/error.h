/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sentence of the calling thread's last failure.
 *
 * Thread: any.
 */
#ifndef GRADD_CLIENT_ERROR_H
#define GRADD_CLIENT_ERROR_H

enum { ERROR_TEXT_BYTES = 1024 };

/* Keep the sentence for gradd_error(); 0. */
int error_keep(const char *format, ...) __attribute__((format(printf, 1, 2)));

static inline int error_status(int kept, int status)
{
    (void)kept;
    return status;
}

/* Keep the sentence, and be status: `return error_set(GRADD_ERR_..., "...", ...)`. An expression
 * and no function, so that compilers and linters see that what comes back is an error. */
#define error_set(status, ...) error_status(error_keep(__VA_ARGS__), (status))

/* The status that a code on the wire stands for; codes unknown here are GRADD_ERR_INTERNAL. */
int error_status_from_wire(unsigned code);

#endif
