/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GRADD_FAKE_VMM_H
#define GRADD_FAKE_VMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The reserved addresses that p lies in. Under fake_lock. */
bool fake_reservation_find(uintptr_t p, uintptr_t *out_base, size_t *out_bytes);
/* Whether the memory behind a RANGE_VMM can be exported. */
bool fake_physical_is_exportable(const void *owner);

#endif
