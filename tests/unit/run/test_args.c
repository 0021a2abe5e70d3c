/* SPDX-License-Identifier: Apache-2.0 */
/* gradrun's command line: what is taken, what is refused and in which words. */
#include "args.h"

#include <errno.h>
#include <string.h>

#include "run_suite.h"

static struct args args;
static char error[512];

/* Parse the words up to a NULL. */
#define PARSE(...) parse((const char *[]){"gradrun", __VA_ARGS__, NULL})
static int parse(const char *const *argv)
{
    /* args borrows from the words, which must outlive the macro's array. */
    static const char *words[64];
    int argc = 0;
    for (; argv[argc]; argc++)
        words[argc] = argv[argc];
    words[argc] = NULL;
    error[0] = '\0';
    args_deinit(&args);
    return args_parse(&args, argc, (char **)words, error, sizeof error);
}

START_TEST(options_end_at_the_command)
{
    ck_assert_int_eq(PARSE("-np", "2", "-v", "python", "-np", "7", "--quiet"), 0);
    ck_assert_uint_eq(args.n_ranks, 2);
    ck_assert(args.is_verbose);
    ck_assert(!args.is_quiet);
    ck_assert_str_eq(args.command[0], "python");
    ck_assert_str_eq(args.command[2], "7");
}
END_TEST

START_TEST(two_dashes_end_the_options)
{
    ck_assert_int_eq(PARSE("-n", "1", "--", "-odd"), 0);
    ck_assert_str_eq(args.command[0], "-odd");
}
END_TEST

START_TEST(values_may_be_joined_with_an_equals_sign)
{
    ck_assert_int_eq(PARSE("--np=3", "--output=d=e", "--timeout=1.5", "-x", "A=b=c", "x"), 0);
    ck_assert_uint_eq(args.n_ranks, 3);
    ck_assert_str_eq(args.output_dir, "d=e");
    ck_assert_double_eq(args.timeout_s, 1.5);
    ck_assert_str_eq(args.exports[0], "A=b=c");
    ck_assert_ptr_null(args.exports[1]);
}
END_TEST

START_TEST(lists_keep_their_order)
{
    ck_assert_int_eq(PARSE("-np", "1", "--private", "--set", "a=1", "-x", "P", "--set", "b=2", "x"),
                     0);
    ck_assert_str_eq(args.settings[0], "a=1");
    ck_assert_str_eq(args.settings[1], "b=2");
    ck_assert_ptr_null(args.settings[2]);
    ck_assert_str_eq(args.exports[0], "P");
}
END_TEST

START_TEST(help_needs_nothing_else)
{
    ck_assert_int_eq(PARSE("--help"), 0);
    ck_assert(args.wants_help);
}
END_TEST

static void expect_refusal(int rc, const char *sentence)
{
    ck_assert_int_eq(rc, -EINVAL);
    ck_assert_str_eq(error, sentence);
}

START_TEST(refusals_say_what_was_expected)
{
    expect_refusal(PARSE("x"), "how many ranks? give -np N");
    expect_refusal(PARSE("-np", "2"), "no command given");
    expect_refusal(PARSE("-np"), "-np needs N");
    expect_refusal(PARSE("-np", "2", "-v=1", "x"), "-v takes no value");
    expect_refusal(PARSE("-np", "2", "--frob", "x"),
                   "unknown option --frob (gradrun --help lists them)");
    expect_refusal(PARSE("-np", "2", "--timeout", "nan", "x"),
                   "--timeout nan: expected a number of seconds above 0");
    expect_refusal(PARSE("-np", "2", "--job", "", "x"),
                   "--job : expected a value that is not empty");
    expect_refusal(PARSE("-np", "2", "-x", "1A=b", "x"), "-x 1A=b: not the name of a variable");
    expect_refusal(PARSE("-np", "2", "--private", "--set", "a", "x"),
                   "--set a: KEY=VALUE expected");
    expect_refusal(PARSE("-np", "2", "--private", "--socket", "s", "x"),
                   "--private and --socket exclude each other");
    ck_assert_int_eq(PARSE("-np", "2", "--set", "a=1", "x"), -EINVAL);
}
END_TEST

START_TEST(hosts_make_the_number_of_ranks_optional)
{
    ck_assert_int_eq(
        PARSE("-H", "a:2,b", "--ssh-port=2222", "--ssh-identity-file", "k", "--set", "a=1", "x"),
        0);
    ck_assert_uint_eq(args.n_ranks, 0);
    ck_assert_str_eq(args.hosts, "a:2,b");
    ck_assert_uint_eq(args.ssh_port, 2222);
    ck_assert_int_eq(PARSE("--hostfile", "f", "--check"), 0);
    ck_assert(args_has_hosts(&args));
    ck_assert_int_eq(PARSE("-np", "2", "--check"), 0);
    ck_assert(args_has_hosts(&args));
}
END_TEST

START_TEST(what_needs_hosts_says_so)
{
    expect_refusal(PARSE("-np", "2", "--rsh", "r", "x"),
                   "--rsh needs hosts: give -H or --hostfile");
    expect_refusal(PARSE("-np", "2", "--system", "x"),
                   "--system needs hosts: give -H or --hostfile");
    expect_refusal(PARSE("-H", "a", "--hostfile", "f", "x"),
                   "-H and --hostfile exclude each other");
    expect_refusal(PARSE("-H", "a", "--system", "--private", "x"),
                   "--system and --private exclude each other");
    expect_refusal(PARSE("-H", "a", "--rsh", "r", "--ssh-port", "2", "x"),
                   "--rsh takes ssh's place: give port and key to that command instead of "
                   "--ssh-port and --ssh-identity-file");
    expect_refusal(PARSE("-H", "a", "--ssh-port", "65536", "x"),
                   "--ssh-port 65536: expected a port from 1 to 65535");
    expect_refusal(PARSE("-H", "a", "--system", "--set", "a=1", "x"),
                   "--set is for a private daemon: add --private (the node's daemon has its own "
                   "gradd.conf)");
}
END_TEST

START_TEST(the_number_of_ranks_is_bounded)
{
    const char *const bad[] = {"0", "-1", "1025", "2x", "", " 2", "99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        ck_assert_int_eq(PARSE("-np", bad[i], "x"), -EINVAL);
    ck_assert_int_eq(PARSE("-np", "1024", "x"), 0);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        options_end_at_the_command,
        two_dashes_end_the_options,
        values_may_be_joined_with_an_equals_sign,
        lists_keep_their_order,
        help_needs_nothing_else,
        refusals_say_what_was_expected,
        hosts_make_the_number_of_ranks_optional,
        what_needs_hosts_says_so,
        the_number_of_ranks_is_bounded,
    };
    int rc = run_suite("args", tests, sizeof tests / sizeof *tests);
    args_deinit(&args);
    return rc;
}
