/* SPDX-License-Identifier: Apache-2.0 */
/* The options table and the parser it drives: what is allowed, what is refused and in which words.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control/config.h"
#include "wire.h"
#include "base/log.h"
#include "gradd/types.h"
#include "run_suite.h"

static struct config config;
static struct config_error error;

static int parse(const char *text)
{
    config_init(&config);
    error.text[0] = '\0';
    return config_read_text(&config, "f", text, &error);
}

static size_t row(const char *key)
{
    size_t i = 0;
    while (i < config_n_options() && strcmp(config_options[i].key, key) != 0)
        i++;
    ck_assert_uint_lt(i, config_n_options());
    return i;
}

START_TEST(every_default_is_written_as_the_table_has_it)
{
    config_init(&config);
    for (size_t i = 0; i < config_n_options(); i++) {
        char text[CONFIG_TEXT_MAX];
        config_format(&config, i, text, sizeof text);
        ck_assert_str_eq(text, config_options[i].default_value);
        ck_assert_str_eq(config.sources[i], "default");
    }
}
END_TEST

START_TEST(keys_are_unique_over_all_sections)
{
    for (size_t i = 0; i < config_n_options(); i++)
        for (size_t j = 0; j < i; j++)
            ck_assert_str_ne(config_options[i].key, config_options[j].key);
}
END_TEST

START_TEST(values_reach_their_fields_in_their_units)
{
    ck_assert_int_eq(parse("; a comment\n"
                           "[daemon]\n"
                           "socket = /run/x y.sock\n"
                           "socket_mode=0600\n"
                           "log_level = debug\n"
                           "\n"
                           "[job]\n"
                           "job_linger_s = 0.25\n"
                           "fusion_bytes = 3k\n"
                           "job_memory_bytes = 2T\n"
                           "[gpu]\n"
                           "backend = nccl\n"
                           "order = flag\n"
                           "max_ctas = 4\n"
                           "[peer]\n"
                           "wire = bf16\n"
                           "data_encryption = yes\n"
                           "peer_dead_s = 2.5\n"
                           "[limits]\n"
                           "max_sessions = 7\n"),
                     0);
    ck_assert_str_eq(config.socket, "/run/x y.sock");
    ck_assert_uint_eq(config.socket_mode, 0600);
    ck_assert_uint_eq(config.log_level, LOG_LEVEL_DEBUG);
    ck_assert_uint_eq(config.job_linger_ms, 250);
    ck_assert_uint_eq(config.fusion_bytes, 3072);
    ck_assert_uint_eq(config.job_memory_bytes, UINT64_C(2) << 40);
    ck_assert_uint_eq(config.max_sessions, 7);
    ck_assert_uint_eq(config.backend, BACKEND_NCCL);
    ck_assert_uint_eq(config.order, PB__QUEUE_ORDER__ORDER_FLAG);
    ck_assert_uint_eq(config.max_ctas, 4);
    ck_assert_uint_eq(config.traffic_class, CONFIG_AUTO);
    ck_assert_uint_eq(config_wire_dtypes[config.wire], GRADD_BF16);
    ck_assert_uint_eq(config.data_encryption, CONFIG_YES);
    ck_assert_uint_eq(config.peer_dead_ms, 2500);
    ck_assert_str_eq(config.sources[row("job_linger_s")], "f:8");
    ck_assert_str_eq(config.sources[row("op_timeout_s")], "default");
}
END_TEST

START_TEST(an_error_says_where_and_what_is_allowed)
{
    static const struct {
        const char *text, *words[2];
    } cases[] = {
        {"[job]\n\nop_timeout = 3\n", {"f:3: unknown key \"op_timeout\"", "op_timeout_s"}},
        {"[gpu]\nbackend = gpu\n", {"f:2: backend = \"gpu\"", "auto, host or nccl"}},
        {"[gpu]\norder = events\n", {"f:2: ", "auto, event or flag"}},
        {"[gpu]\nmax_ctas = 0\n", {"f:2: ", "auto, or a number from 1 to 64"}},
        {"[gpu]\ntraffic_class = 256\n", {"f:2: ", "auto, or a number from 0 to 255"}},
        {"[gpu]\ntraffic_class = 18446744073709551615\n", {"f:2: ", "auto, or a number"}},
        {"[jobs]\nx = 3\n", {"f:2: unknown section [jobs]", "[job]"}},
        {"[job]\nsocket = /x\n", {"f:2: ", "belongs into section [daemon]"}},
        {"[job]\njob_linger_s = 1\njob_linger_s = 2\n", {"f:3: ", "already in line 2"}},
        {"[job]\njob_linger_s = -1\n", {"f:2: job_linger_s = \"-1\"", "seconds from 0 to 86400"}},
        {"[job]\njob_linger_s = nan\n", {"f:2: ", "seconds"}},
        {"[job]\njob_linger_s = 1e3\n", {"f:2: ", "seconds"}},
        {"[job]\njob_linger_s =\n", {"f:2: ", "seconds"}},
        {"[job]\nfusion_bytes = 1Q\n", {"f:2: ", "suffixes k, M, G, T"}},
        {"[job]\nfusion_bytes = 5G\n", {"f:2: ", "from 0 to 4G"}},
        {"[job]\njob_memory_bytes = 99999999999T\n", {"f:2: ", "from 1M to 1024T"}},
        {"[job]\nmax_in_flight = 0\n", {"f:2: ", "a number from 1 to 1048576"}},
        {"[job]\nmax_in_flight = 1 2\n", {"f:2: ", "a number"}},
        {"[daemon]\nsocket_mode = 0888\n", {"f:2: ", "octal permissions from 0000 to 0777"}},
        {"[daemon]\nlog_level = loud\n", {"f:2: ", "error, warning, notice, info or debug"}},
        {"[peer]\nwire = fp8\n", {"f:2: wire = \"fp8\"", "none, fp16 or bf16"}},
        {"[peer]\ndata_encryption = 1\n", {"f:2: ", "no or yes"}},
        {"[peer]\npeer_port = 65536\n", {"f:2: ", "a number from 0 to 65535"}},
        {"[daemon]\nsocket =\n", {"f:2: ", "a text of 1 to 107 bytes"}},
        {"[job]\nwhat is this\n", {"f:2: expected", "key = value"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_int_eq(parse(cases[i].text), -EINVAL);
        for (size_t j = 0; j < 2; j++)
            ck_assert_msg(strstr(error.text, cases[i].words[j]), "\"%s\" lacks \"%s\"", error.text,
                          cases[i].words[j]);
    }
}
END_TEST

START_TEST(a_line_too_long_is_an_error_and_not_two_lines)
{
    char text[600] = "[daemon]\nnode_name = ";
    memset(text + strlen(text), 'x', 300);
    strcat(text, "\n");
    ck_assert_int_eq(parse(text), -EINVAL);
    ck_assert_msg(strstr(error.text, "f:2: the line is longer"), "%s", error.text);
}
END_TEST

START_TEST(a_file_with_an_error_changes_nothing)
{
    ck_assert_int_eq(parse("[job]\njob_linger_s = 5\nnonsense = 1\n"), -EINVAL);
    ck_assert_uint_eq(config.job_linger_ms, 60000);
    ck_assert_str_eq(config.sources[row("job_linger_s")], "default");
}
END_TEST

START_TEST(a_setting_needs_no_section_and_takes_precedence)
{
    ck_assert_int_eq(parse("[job]\njob_linger_s = 5\n"), 0);
    ck_assert_int_eq(config_set(&config, "job_linger_s=6", "--set", &error), 0);
    ck_assert_uint_eq(config.job_linger_ms, 6000);
    ck_assert_str_eq(config.sources[row("job_linger_s")], "--set");
    static const char *const wrong[] = {"job_linger_s", "=3", "", "no=1", "job_linger_s=x"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        ck_assert_int_eq(config_set(&config, wrong[i], "--set", &error), -EINVAL);
    ck_assert_uint_eq(config.job_linger_ms, 6000);
}
END_TEST

START_TEST(a_file_that_is_not_there_is_told_from_one_that_is_wrong)
{
    config_init(&config);
    ck_assert_int_eq(config_read_file(&config, "/nonexistent/gradd.conf", &error), -ENOENT);
    ck_assert_msg(strstr(error.text, "/nonexistent/gradd.conf: "), "%s", error.text);
}
END_TEST

START_TEST(reload_takes_what_it_may_and_names_what_needs_a_restart)
{
    struct config fresh;
    config_init(&fresh);
    ck_assert_int_eq(config_set(&fresh, "job_linger_s=1", "--set", &error), 0);
    ck_assert_int_eq(config_set(&fresh, "socket=/x", "--set", &error), 0);
    ck_assert_int_eq(config_set(&fresh, "socket_mode=0600", "--set", &error), 0);
    config_init(&config);
    char fixed[128];
    ck_assert_uint_eq(config_take_reloadable(&config, &fresh, fixed, sizeof fixed), 2);
    ck_assert_str_eq(fixed, "socket, socket_mode");
    ck_assert_uint_eq(config.job_linger_ms, 1000);
    ck_assert_str_eq(config.sources[row("job_linger_s")], "--set");
    ck_assert_str_eq(config.socket, "/run/gradd/gradd.sock");
    ck_assert_str_eq(config.sources[row("socket")], "default");
    ck_assert_uint_eq(config_take_reloadable(&config, &config, fixed, sizeof fixed), 0);
    ck_assert_str_eq(fixed, "");
}
END_TEST

/* The shipped file shows "#key = default" for every option. */
START_TEST(the_shipped_file_lists_every_option_with_its_default)
{
    FILE *file = fopen(GRADD_CONF, "re");
    ck_assert_ptr_nonnull(file);
    char line[256], text[8192] = "";
    while (fgets(line, sizeof line, file)) {
        bool is_option = line[0] == '#' && line[1] >= 'a' && line[1] <= 'z' && strstr(line, " =");
        strcat(text, is_option ? line + 1 : line);
    }
    fclose(file);
    struct config shipped;
    config_init(&shipped);
    config_init(&config);
    ck_assert_msg(config_read_text(&shipped, "f", text, &error) == 0, "%s", error.text);
    for (size_t i = 0; i < config_n_options(); i++) {
        char shown[CONFIG_TEXT_MAX];
        ck_assert_msg(strncmp(shipped.sources[i], "f:", 2) == 0, "%s is not in the file",
                      config_options[i].key);
        config_format(&shipped, i, shown, sizeof shown);
        ck_assert_str_eq(shown, config_options[i].default_value);
    }
}
END_TEST

START_TEST(the_manual_has_every_option)
{
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    ck_assert_ptr_nonnull(file);
    config_print_options(file);
    fclose(file);
    for (size_t i = 0; i < config_n_options(); i++) {
        char heading[80];
        snprintf(heading, sizeof heading, "*%s* = ", config_options[i].key);
        ck_assert_ptr_nonnull(strstr(text, heading));
        ck_assert_ptr_nonnull(strstr(text, config_options[i].doc));
    }
    free(text);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        every_default_is_written_as_the_table_has_it,
        keys_are_unique_over_all_sections,
        values_reach_their_fields_in_their_units,
        an_error_says_where_and_what_is_allowed,
        a_line_too_long_is_an_error_and_not_two_lines,
        a_file_with_an_error_changes_nothing,
        a_setting_needs_no_section_and_takes_precedence,
        a_file_that_is_not_there_is_told_from_one_that_is_wrong,
        reload_takes_what_it_may_and_names_what_needs_a_restart,
        the_shipped_file_lists_every_option_with_its_default,
        the_manual_has_every_option,
    };
    return run_suite("config", tests, sizeof tests / sizeof *tests);
}
