/* SPDX-License-Identifier: Apache-2.0 */
/* Hosts from -H and host files, and where the ranks go. */
#include "hosts.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "run_suite.h"

static struct hosts hosts;
static char error[512];

static int list(const char *text)
{
    hosts_deinit(&hosts);
    error[0] = '\0';
    return hosts_parse_list(&hosts, text, error, sizeof error);
}

static int file(const char *text)
{
    hosts_deinit(&hosts);
    error[0] = '\0';
    return hosts_parse_text(&hosts, "f", text, error, sizeof error);
}

/* "name:slots name:slots ..." */
static const char *shown(void)
{
    static char text[512];
    size_t n = 0;
    text[0] = '\0';
    for (unsigned i = 0; i < hosts.n; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s:%u", i ? " " : "",
                              hosts.list[i].name, hosts.list[i].n_slots);
    return text;
}

START_TEST(a_list_names_hosts_and_slots)
{
    ck_assert_int_eq(list("a:2,b,user@c.example:4"), 0);
    ck_assert_str_eq(shown(), "a:2 b:1 user@c.example:4");
    ck_assert_str_eq(host_address(&hosts.list[2]), "c.example");
}
END_TEST

START_TEST(addresses_of_ipv6_stand_in_brackets)
{
    ck_assert_int_eq(list("[fd00::1]:2,[fd00::2],fd00::3"), 0);
    ck_assert_str_eq(shown(), "fd00::1:2 fd00::2:1 fd00::3:1");
}
END_TEST

START_TEST(slots_of_the_same_host_add_up)
{
    ck_assert_int_eq(list("a:2,b,a:3"), 0);
    ck_assert_str_eq(shown(), "a:5 b:1");
}
END_TEST

START_TEST(a_bad_list_is_refused_in_words)
{
    const char *const bad[] = {
        "",     ",a",   "a,",    "a:",    "a:0",           "a:x",   "a:1025",
        "-oX",  "a b",  "a;rm",  "user@", "[fd00::1",      "[a]x",  "a:2,-b:1",
        "a:+1", "a: 1", "$(id)", "'a'",   "a:99999999999", "a:1:2@"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        ck_assert_msg(list(bad[i]) == -EINVAL, "taken: %s as %s", bad[i], shown());
    ck_assert_int_eq(list("a:2,b:zero"), -EINVAL);
    ck_assert_str_eq(error, "-H a:2,b:zero: \"b:zero\" is not HOST[:SLOTS] with 1 to 1024 slots");
}
END_TEST

START_TEST(host_files_have_the_forms_of_horovod_and_mpi)
{
    ck_assert_int_eq(file("# cluster\n"
                          "a slots=2\n"
                          "b:3   # three\n"
                          "\n"
                          "  c\tslots = 4 max_slots=8\r\n"
                          "d max-slots=2\n"
                          "e"),
                     0);
    ck_assert_str_eq(shown(), "a:2 b:3 c:4 d:1 e:1");
}
END_TEST

START_TEST(a_bad_host_file_is_refused_with_its_line)
{
    ck_assert_int_eq(file("a slots=2\nb slot=3\n"), -EINVAL);
    ck_assert_str_eq(error, "f:2: \"b slot=3\" is neither HOST, HOST:N nor HOST slots=N "
                            "[max_slots=M], with N from 1 to 1024");
    ck_assert_int_eq(file("a slots=4 max_slots=2\n"), -EINVAL);
    ck_assert_str_eq(error, "f:1: slots=4 is more than max_slots=2");
    ck_assert_int_eq(file("# nothing\n"), -EINVAL);
    ck_assert_str_eq(error, "f: names no host");
    const char *const bad[] = {"a slots", "a slots=", "a slots=0",  "a slots=2x",
                               "a 2",     "-a",       "a slots=2 b"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        ck_assert_msg(file(bad[i]) == -EINVAL, "taken: %s", bad[i]);
}
END_TEST

START_TEST(ranks_fill_host_after_host)
{
    ck_assert_int_eq(list("a:2,b:3,c:2"), 0);
    ck_assert_int_eq(hosts_place(&hosts, 4, error, sizeof error), 0);
    ck_assert_uint_eq(hosts.n, 2); /* c gets none */
    ck_assert_uint_eq(hosts.list[1].first_rank, 2);
    ck_assert_uint_eq(hosts.list[1].n_ranks, 2);
    ck_assert_uint_eq(hosts_n_ranks(&hosts), 4);
}
END_TEST

START_TEST(without_a_number_all_slots_are_used)
{
    ck_assert_int_eq(list("a:2,b:3"), 0);
    ck_assert_int_eq(hosts_place(&hosts, 0, error, sizeof error), 0);
    ck_assert_uint_eq(hosts_n_ranks(&hosts), 5);
    ck_assert_int_eq(hosts_place(&hosts, 6, error, sizeof error), -EINVAL);
    ck_assert_str_eq(error, "6 ranks do not fit into the 5 slots of 2 host(s): give more hosts or "
                            "more slots (HOST:SLOTS)");
}
END_TEST

START_TEST(cross_ranks_count_hosts_that_have_the_local_rank)
{
    unsigned rank, size;
    ck_assert_int_eq(list("a:2,b:1,c:2"), 0);
    ck_assert_int_eq(hosts_place(&hosts, 0, error, sizeof error), 0);
    hosts_cross(&hosts, 2, 1, &rank, &size);
    ck_assert_uint_eq(rank, 1);
    ck_assert_uint_eq(size, 2);
    hosts_cross(&hosts, 2, 0, &rank, &size);
    ck_assert_uint_eq(rank, 2);
    ck_assert_uint_eq(size, 3);
}
END_TEST

START_TEST(this_machine_needs_no_remote_shell)
{
    char own[256] = "";
    ck_assert_int_eq(gethostname(own, sizeof own - 1), 0);
    const char *const local[] = {"localhost", "127.0.0.1", "127.3.2.1", own};
    const char *const remote[] = {"192.0.2.1", "root@localhost", "localhost.example", "0.0.0.0"};
    for (size_t i = 0; i < 4; i++) {
        struct host host = {0};
        snprintf(host.name, sizeof host.name, "%s", local[i]);
        ck_assert_msg(host_is_local(&host), "%s is remote", local[i]);
        snprintf(host.name, sizeof host.name, "%s", remote[i]);
        ck_assert_msg(!host_is_local(&host), "%s is local", remote[i]);
    }
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_list_names_hosts_and_slots,
        addresses_of_ipv6_stand_in_brackets,
        slots_of_the_same_host_add_up,
        a_bad_list_is_refused_in_words,
        host_files_have_the_forms_of_horovod_and_mpi,
        a_bad_host_file_is_refused_with_its_line,
        ranks_fill_host_after_host,
        without_a_number_all_slots_are_used,
        cross_ranks_count_hosts_that_have_the_local_rank,
        this_machine_needs_no_remote_shell,
    };
    int rc = run_suite("hosts", tests, sizeof tests / sizeof *tests);
    hosts_deinit(&hosts);
    return rc;
}
