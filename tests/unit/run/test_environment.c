/* SPDX-License-Identifier: Apache-2.0 */
/* The variables of a rank, in the names of each launcher. */
#include "environment.h"

#include <errno.h>
#include <string.h>

#include "run_suite.h"

static const char *get(char **list, const char *name)
{
    const char *found = NULL;
    for (size_t n = strlen(name); *list; list++) {
        if (strncmp(*list, name, n) != 0 || (*list)[n] != '=')
            continue;
        ck_assert_msg(!found, "%s stands in the environment twice", name);
        found = *list + n + 1;
    }
    return found;
}

static char *inherited[] = {(char *)"PATH=/bin",     (char *)"RANK=9",
                            (char *)"MASTER_PORT=1", (char *)"GRADD_LIBRARY=mine",
                            (char *)"RANKING=first", NULL};

/* Rank r of a job on one host. */
static char **of_rank(const struct environment *environment, unsigned r)
{
    const struct place place = {
        .rank = r, .local_rank = r, .local_size = environment->n_ranks, .cross_size = 1};
    return environment_of_rank(environment, &place, inherited);
}

START_TEST(a_rank_has_its_identity_in_every_launchers_names)
{
    const struct environment environment = {
        .socket = "/s", .job = "j", .n_ranks = 4, .n_hosts = 1, .master_port = 1234};
    char **list = of_rank(&environment, 3);
    const char *const expected[][2] = {
        {"GRADD_SOCKET", "/s"},
        {"GRADD_JOB", "j"},
        {"GRADD_RANK", "3"},
        {"GRADD_WORLD_SIZE", "4"},
        {"GRADD_LOCAL_RANK", "3"},
        {"GRADD_LOCAL_SIZE", "4"},
        {"RANK", "3"},
        {"WORLD_SIZE", "4"},
        {"LOCAL_RANK", "3"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"GROUP_RANK", "0"},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", "1234"},
        {"HOROVOD_RANK", "3"},
        {"HOROVOD_SIZE", "4"},
        {"HOROVOD_LOCAL_RANK", "3"},
        {"HOROVOD_LOCAL_SIZE", "4"},
        {"HOROVOD_CROSS_RANK", "0"},
        {"HOROVOD_CROSS_SIZE", "1"},
        {"PYTHONUNBUFFERED", "1"},
        {"PATH", "/bin"},
        {"RANKING", "first"},
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        ck_assert_pstr_eq(get(list, expected[i][0]), expected[i][1]);
    environment_free(list);
}
END_TEST

START_TEST(a_rank_of_several_hosts_knows_its_place)
{
    const struct environment environment = {.socket = "/s",
                                            .job = "j",
                                            .n_ranks = 5,
                                            .n_hosts = 3,
                                            .host_index = 1,
                                            .coordinator = "10.0.0.1:7001",
                                            .master_address = "10.0.0.1",
                                            .master_port = 7002};
    const struct place place = {
        .rank = 3, .local_rank = 1, .local_size = 2, .cross_rank = 1, .cross_size = 2};
    char **list = environment_of_rank(&environment, &place, inherited);
    const char *const expected[][2] = {
        {"GRADD_RANK", "3"},         {"GRADD_WORLD_SIZE", "5"},
        {"GRADD_LOCAL_RANK", "1"},   {"GRADD_LOCAL_SIZE", "2"},
        {"LOCAL_RANK", "1"},         {"LOCAL_WORLD_SIZE", "2"},
        {"GROUP_RANK", "1"},         {"GROUP_WORLD_SIZE", "3"},
        {"MASTER_ADDR", "10.0.0.1"}, {"GRADD_COORDINATOR", "10.0.0.1:7001"},
        {"MASTER_PORT", "7002"},     {"HOROVOD_LOCAL_SIZE", "2"},
        {"HOROVOD_CROSS_RANK", "1"}, {"HOROVOD_CROSS_SIZE", "2"},
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        ck_assert_pstr_eq(get(list, expected[i][0]), expected[i][1]);
    environment_free(list);
}
END_TEST

START_TEST(a_coordinator_of_another_launcher_is_not_passed_on)
{
    char *stale[] = {(char *)"GRADD_COORDINATOR=old:1", (char *)"PATH=/bin", NULL};
    const struct environment environment = {.job = "j", .n_ranks = 1, .n_hosts = 1};
    const struct place place = {.local_size = 1, .cross_size = 1};
    char **list = environment_of_rank(&environment, &place, stale);
    ck_assert_ptr_null(get(list, "GRADD_COORDINATOR"));
    ck_assert_pstr_eq(get(list, "PATH"), "/bin");
    environment_free(list);
}
END_TEST

START_TEST(what_is_not_known_is_left_alone)
{
    const struct environment environment = {.socket = NULL, .job = "j", .n_ranks = 1};
    char **list = of_rank(&environment, 0);
    ck_assert_ptr_null(get(list, "GRADD_SOCKET"));
    ck_assert_pstr_eq(get(list, "GRADD_LIBRARY"), "mine");
    ck_assert_pstr_eq(get(list, "MASTER_PORT"), "1");
    environment_free(list);
}
END_TEST

START_TEST(the_users_exports_win)
{
    const char *exports[] = {"MASTER_PORT=77", "NEW=v=w", "PATH", NULL};
    const struct environment environment = {.socket = "/s",
                                            .job = "j",
                                            .n_ranks = 1,
                                            .master_port = 5,
                                            .library = "/lib",
                                            .exports = exports};
    char **list = of_rank(&environment, 0);
    ck_assert_pstr_eq(get(list, "MASTER_PORT"), "77");
    ck_assert_pstr_eq(get(list, "NEW"), "v=w");
    ck_assert_pstr_eq(get(list, "PATH"), "/bin");
    ck_assert_pstr_eq(get(list, "GRADD_LIBRARY"), "/lib");
    environment_free(list);
}
END_TEST

START_TEST(exports_may_not_change_who_a_rank_is)
{
    char error[512];
    ck_assert_int_eq(environment_check_export("RANK=1", inherited, error, sizeof error), -EINVAL);
    ck_assert_pstr_eq(error, "-x RANK=1: gradrun sets RANK itself, for each rank (see --job, "
                             "--socket, -np)");
    ck_assert_int_eq(environment_check_export("MASTER_PORT=1", inherited, error, sizeof error), 0);
}
END_TEST

START_TEST(an_export_without_value_must_be_set)
{
    char error[512];
    ck_assert_int_eq(environment_check_export("PATH", inherited, error, sizeof error), 0);
    ck_assert_int_eq(environment_check_export("PAT", inherited, error, sizeof error), -EINVAL);
    ck_assert_pstr_eq(error, "-x PAT: not set here; give -x PAT=VALUE");
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_rank_has_its_identity_in_every_launchers_names,
        a_rank_of_several_hosts_knows_its_place,
        a_coordinator_of_another_launcher_is_not_passed_on,
        what_is_not_known_is_left_alone,
        the_users_exports_win,
        exports_may_not_change_who_a_rank_is,
        an_export_without_value_must_be_set,
    };
    return run_suite("environment", tests, sizeof tests / sizeof *tests);
}
