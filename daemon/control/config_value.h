/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Values of options in memory and as text: what config.c and config_value.c share. The other
 * direction, text from a value, is public: config_format() and config_allowed() in config.h.
 *
 * Thread: loop. `i` is a row of config_options.
 */
#ifndef GRADD_CONTROL_CONFIG_VALUE_H
#define GRADD_CONTROL_CONFIG_VALUE_H

#include "control/config.h"

/* Where the value of row i is: char[CONFIG_TEXT_MAX] or uint64_t, as its type says. */
void *config_value_place(struct config *config, size_t i);

/* Store the text in row i. False, and nothing changed: not what the row allows. */
bool config_value_assign(struct config *config, size_t i, const char *text);

#endif
