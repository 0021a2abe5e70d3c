/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration file and --set: whatever they contain, the result is within the table's limits
 * or nothing changes and there is a sentence. */
#include <stdlib.h>
#include <string.h>

#include "control/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_values(const struct config *config)
{
    struct config again = *config;
    for (size_t i = 0; i < config_n_options(); i++) {
        char value[CONFIG_TEXT_MAX + 1], assignment[2 * CONFIG_TEXT_MAX];
        config_format(config, i, value, sizeof value);
        snprintf(assignment, sizeof assignment, "%s=%s", config_options[i].key, value);
        struct config_error error;
        /* What was accepted is accepted again as it is shown. */
        if (config_set(&again, assignment, "again", &error) < 0)
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    if (!text)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    struct config config, before;
    struct config_error error = {""};
    config_init(&config);
    before = config;
    if (config_read_text(&config, "fuzz", text, &error) == 0)
        check_values(&config);
    else if (!*error.text || memcmp(&config, &before, sizeof config) != 0)
        abort();
    config_init(&config);
    if (config_set(&config, text, "--set", &error) == 0)
        check_values(&config);
    free(text);
    return 0;
}
