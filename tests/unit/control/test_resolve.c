/* SPDX-License-Identifier: Apache-2.0 */
/* "host:port" in all its forms, and names that are looked up while the loop goes on. */
#include <stdio.h>
#include <string.h>

#include "control/resolve.h"
#include "run_suite.h"

START_TEST(host_and_port_are_told_apart)
{
    static const struct {
        const char *text, *host;
        uint16_t port;
    } rows[] = {
        {"node7", "node7", 7010},
        {"node7:1", "node7", 1},
        {"10.0.0.1:65535", "10.0.0.1", 65535},
        {"[fe80::1]:80", "fe80::1", 80},
        {"[::1]", "::1", 7010},
        {"::1", "::1", 7010},
        {"fe80::1:80", "fe80::1:80", 7010},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char host[RESOLVE_HOST_MAX + 1];
        uint16_t port;
        ck_assert_msg(resolve_split(rows[i].text, 7010, host, &port), "%s", rows[i].text);
        ck_assert_str_eq(host, rows[i].host);
        ck_assert_uint_eq(port, rows[i].port);
    }
}
END_TEST

START_TEST(what_is_neither_is_refused)
{
    static const char *const texts[] = {"",      ":80",   "a:",     "a:0",   "a:65536",
                                        "a:8x",  "a:-1",  "[::1",   "[]:80", "[::1]80",
                                        "a b:1", "a\n:1", "[::1]:", "a:+5",  "a: 5"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char host[RESOLVE_HOST_MAX + 1];
        uint16_t port;
        ck_assert_msg(!resolve_split(texts[i], 7010, host, &port), "\"%s\"", texts[i]);
    }
    char host[RESOLVE_HOST_MAX + 1], text[RESOLVE_HOST_MAX + 8];
    uint16_t port;
    memset(text, 'h', sizeof text);
    text[RESOLVE_HOST_MAX] = '\0';
    ck_assert(resolve_split(text, 7010, host, &port));
    text[RESOLVE_HOST_MAX] = 'h';
    text[RESOLVE_HOST_MAX + 1] = '\0';
    ck_assert(!resolve_split(text, 7010, host, &port));
}
END_TEST

static struct peer_address number(const char *host, uint16_t port)
{
    struct peer_address address;
    ck_assert_msg(resolve_number(host, port, &address), "%s", host);
    return address;
}

START_TEST(addresses_are_shown_and_compared)
{
    char text[RESOLVE_TEXT_MAX];
    struct peer_address plain = number("10.1.2.3", 5), mapped = number("::ffff:10.1.2.3", 6);
    struct peer_address v6 = number("fe80::1", 7);
    resolve_format(&plain, text, sizeof text);
    ck_assert_str_eq(text, "10.1.2.3:5");
    resolve_format(&mapped, text, sizeof text);
    ck_assert_str_eq(text, "10.1.2.3:6");
    resolve_format(&v6, text, sizeof text);
    ck_assert_str_eq(text, "[fe80::1]:7");
    ck_assert(resolve_is_same_host(&plain, &mapped));
    ck_assert(!resolve_is_same_host(&plain, &v6));
    struct peer_address other = number("10.1.2.4", 5);
    ck_assert(!resolve_is_same_host(&plain, &other));
    ck_assert(!resolve_number("localhost", 1, &other));
}
END_TEST

START_TEST(the_loopback_interface_has_several_addresses)
{
    static const char *const inside[] = {"127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"};
    static const char *const outside[] = {"128.0.0.1", "0.0.0.0", "::", "10.0.0.1", "fe80::1"};
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++) {
        struct peer_address address = number(inside[i], 1);
        ck_assert_msg(resolve_is_loopback(&address), "%s", inside[i]);
    }
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        struct peer_address address = number(outside[i], 1);
        ck_assert_msg(!resolve_is_loopback(&address), "%s", outside[i]);
    }
}
END_TEST

/* ------------------------------------------------------------------ names */

struct answers {
    unsigned n, n_addresses;
};

static void on_answer(void *data, const struct resolved *result)
{
    struct answers *answers = data;
    answers->n++;
    answers->n_addresses += result->n_addresses;
    ck_assert(result->n_addresses > 0 || *result->error);
}

START_TEST(who_asks_for_the_same_name_shares_the_answer)
{
    struct loop *loop = loop_new();
    struct resolver *resolver = resolver_new(loop);
    struct answers answers = {0};
    for (unsigned i = 0; i < 4 * LOOKUPS_MAX; i++)
        ck_assert_ptr_nonnull(resolve_start(resolver, "localhost", 80, on_answer, &answers));
    struct resolution *cancelled = resolve_start(resolver, "localhost", 80, on_answer, NULL);
    resolve_cancel(cancelled);
    ck_assert_uint_eq(answers.n, 0); /* never inside */
    while (answers.n < 4 * LOOKUPS_MAX)
        loop_step(loop, true);
    ck_assert_uint_ge(answers.n_addresses, answers.n);
    resolver_free(resolver);
    loop_free(loop);
}
END_TEST

START_TEST(a_flood_of_names_is_refused)
{
    struct loop *loop = loop_new();
    struct resolver *resolver = resolver_new(loop);
    struct answers answers = {0};
    char name[32];
    for (unsigned i = 0; i < LOOKUPS_MAX; i++) {
        snprintf(name, sizeof name, "gradd-%u.invalid", i);
        ck_assert_ptr_nonnull(resolve_start(resolver, name, 80, on_answer, &answers));
    }
    ck_assert_ptr_null(resolve_start(resolver, "one.too.many.invalid", 80, on_answer, &answers));
    while (answers.n < LOOKUPS_MAX)
        loop_step(loop, true);
    ck_assert_uint_eq(answers.n_addresses, 0);
    ck_assert_ptr_nonnull(resolve_start(resolver, "localhost", 80, on_answer, &answers));
    while (answers.n < LOOKUPS_MAX + 1)
        loop_step(loop, true);
    resolver_free(resolver);
    loop_free(loop);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        host_and_port_are_told_apart,
        what_is_neither_is_refused,
        addresses_are_shown_and_compared,
        the_loopback_interface_has_several_addresses,
        who_asks_for_the_same_name_shares_the_answer,
        a_flood_of_names_is_refused,
    };
    return run_suite("resolve", tests, sizeof tests / sizeof *tests);
}
