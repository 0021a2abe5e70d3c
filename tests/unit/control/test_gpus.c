/* SPDX-License-Identifier: Apache-2.0 */
/* What the probe of the GPUs says, and when device memory goes through the host instead. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <check.h>

#include "../proto/run_suite.h"
#include "control/gpus.h"

#define GPU "gpu GPU-00 85899345920 9.0 "

static struct gpus gpus;

static bool parse(const char *text)
{
    char copy[4096];
    gpus = (struct gpus){0};
    snprintf(copy, sizeof copy, "%s", text);
    return gpus_parse(&gpus, copy);
}

START_TEST(a_node_with_all_of_it_takes_device_memory)
{
    ck_assert(parse("driver 13.0\n" GPU "default no-mps NVIDIA H100 80GB\n" GPU
                    "exclusive mps NVIDIA H100 80GB\nnccl 2.28.9 lacks nothing\nkernels sm_90\n"
                    "end\n"));
    ck_assert(gpus.device_path);
    ck_assert_str_eq(gpus.text, "");
    ck_assert_str_eq(gpus.driver, "13.0");
    ck_assert_str_eq(gpus.nccl, "2.28.9 lacks nothing");
    ck_assert_uint_eq(gpus.n_gpus, 2);
    ck_assert_str_eq(gpus.gpus[0].uuid, "GPU-00");
    ck_assert_str_eq(gpus.gpus[0].name, "NVIDIA H100 80GB");
    ck_assert_uint_eq(gpus.gpus[0].memory_bytes, UINT64_C(85899345920));
    ck_assert(!gpus.gpus[0].has_mps);
    ck_assert(gpus.gpus[1].has_mps);
}
END_TEST

START_TEST(what_is_missing_is_the_reason)
{
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"driver - no CUDA driver: libcuda.so.1\nnccl 2.28.9\nend\n", "no CUDA driver"},
        {"nccl 2.28.9\nend\n", "no driver"},
        {"driver 13.0\nnccl 2.28.9\nend\n", "finds no GPU"},
        {"driver 13.0\n" GPU "default no-mps X\nnccl - no NCCL: libnccl.so.2\nend\n", "no NCCL:"},
        {"driver 13.0\n" GPU "exclusive no-mps X\nnccl 2.28.9\nend\n", "MPS is needed"},
        {"driver 13.0\n" GPU "prohibited mps X\nnccl 2.28.9\nend\n", "compute mode"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert(parse(cases[i].text));
        ck_assert(!gpus.device_path);
        ck_assert_msg(strstr(gpus.text, cases[i].why) != NULL, "case %zu: %s", i, gpus.text);
    }
}
END_TEST

START_TEST(lines_that_are_no_gpu_are_none)
{
    char text[GPUS_MAX * 64 * 2] = "driver 13.0\nnccl 2.28.9\n";
    ck_assert(parse("driver 13.0\ngpu\ngpu x\ngpu GPU-00 many 9.0 default mps X\nend\n"));
    ck_assert_uint_eq(gpus.n_gpus, 0);
    for (int i = 0; i < GPUS_MAX + 8; i++)
        strcat(text, GPU "default no-mps X\n");
    ck_assert(parse(strcat(text, "end\n")));
    ck_assert_uint_eq(gpus.n_gpus, GPUS_MAX);
    ck_assert(!parse("driver 13.0\nnccl 2.28.9\n"));
}
END_TEST

static void on_done(void *owner)
{
    ++*(int *)owner;
}

static int ask(const char *program)
{
    int n_done = 0;
    struct loop *loop = loop_new();
    gpus = (struct gpus){0};
    gpus_start(&gpus, loop, program, on_done, &n_done);
    while (!gpus.is_done)
        loop_step(loop, true);
    while (gpus.pid > 0)
        gpus_reap(&gpus);
    gpus_stop(&gpus);
    loop_free(loop);
    return n_done;
}

START_TEST(a_program_is_asked_and_reaped)
{
    char path[] = "/tmp/gradd-test-XXXXXX";
    int fd = mkstemp(path);
    const char script[] = "#!/bin/sh\n[ \"$1\" = --gpus ] && echo driver 13.0 && echo end\n";
    ck_assert_int_eq(write(fd, script, sizeof script - 1), sizeof script - 1);
    fchmod(fd, 0700);
    close(fd);
    ck_assert_int_eq(ask(path), 1);
    unlink(path);
    ck_assert_str_eq(gpus.driver, "13.0");
    ck_assert_int_eq(gpus.pid, 0);
}
END_TEST

START_TEST(a_probe_that_says_nothing_leaves_the_host)
{
    ck_assert_int_eq(ask("/bin/true"), 1);
    ck_assert(!gpus.device_path);
    ck_assert_ptr_nonnull(strstr(gpus.text, "ended before"));
    ck_assert_int_eq(ask("/nonexistent/gradd-worker"), 1);
    ck_assert(!gpus.device_path);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_node_with_all_of_it_takes_device_memory,
        what_is_missing_is_the_reason,
        lines_that_are_no_gpu_are_none,
        a_program_is_asked_and_reaped,
        a_probe_that_says_nothing_leaves_the_host,
    };
    return run_suite("gpus", tests, sizeof tests / sizeof *tests);
}
