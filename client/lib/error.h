/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sentence of the calling thread's last failure.
 *
 * Thread: any.
 */
#ifndef GRADD_CLIENT_ERROR_H
#define GRADD_CLIENT_ERROR_H

enum { ERROR_TEXT_BYTES = 1024 };

/* Keep the sentence for gradd_error(), and return status: `return error_set(...)`. */
int error_set(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The status that a code on the wire stands for; codes unknown here are GRADD_ERR_INTERNAL. */
int error_status_from_wire(unsigned code);

#endif
