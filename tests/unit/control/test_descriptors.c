/* SPDX-License-Identifier: Apache-2.0 */
/* How descriptors are shared out: all that is allowed at the same time fits into the limit. */
#include "control/descriptors.h"
#include "control/peer_visitor.h"
#include "run_suite.h"

enum { SOCKET_AND_PIDFD = 2 };

START_TEST(all_that_is_allowed_at_once_fits)
{
    static const uint64_t limits[] = {1024, 4096, 65536, 1 << 20};
    for (unsigned has_peers = 0; has_peers <= 1; has_peers++) {
        for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
            uint64_t connections = descriptors_sessions(limits[i], has_peers) + DESCRIPTORS_ADMINS;
            uint64_t strangers = has_peers ? VISITORS_MAX : 0;
            ck_assert_uint_le(connections * SOCKET_AND_PIDFD + strangers, limits[i]);
            ck_assert_uint_gt(connections, DESCRIPTORS_ADMINS + 1);
        }
    }
}
END_TEST

START_TEST(every_visitor_that_is_allowed_has_its_descriptor_reserved)
{
    ck_assert_uint_gt(descriptors_reserved(true), descriptors_reserved(false) + VISITORS_MAX);
}
END_TEST

START_TEST(a_daemon_without_other_nodes_serves_more)
{
    ck_assert_uint_gt(descriptors_sessions(1024, false), descriptors_sessions(1024, true));
}
END_TEST

START_TEST(there_is_always_one_session_and_never_more_than_can_be_set)
{
    ck_assert_uint_eq(descriptors_sessions(0, true), 1);
    ck_assert_uint_eq(descriptors_sessions(descriptors_reserved(true), true), 1);
    ck_assert_uint_eq(descriptors_sessions(UINT64_MAX, false), DESCRIPTORS_SESSIONS_MAX);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        all_that_is_allowed_at_once_fits,
        every_visitor_that_is_allowed_has_its_descriptor_reserved,
        a_daemon_without_other_nodes_serves_more,
        there_is_always_one_session_and_never_more_than_can_be_set,
    };
    return run_suite("descriptors", tests, sizeof tests / sizeof *tests);
}
