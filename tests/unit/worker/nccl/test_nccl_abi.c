/* SPDX-License-Identifier: Apache-2.0 */
/* What nccl_abi.h declares is what <nccl.h> declares. Built where NCCL's header is found. */
#include <string.h>

#include "nccl_abi_list.h"
#include "run_suite.h"

START_TEST(our_declarations_are_those_of_the_header)
{
    ck_assert_uint_eq(nccl_abi_ours_count, nccl_abi_theirs_count);
    for (size_t i = 0; i < nccl_abi_ours_count; i++)
        ck_assert_msg(nccl_abi_ours[i].value == nccl_abi_theirs[i].value,
                      "%s: %lld, <nccl.h>: %lld", nccl_abi_ours[i].name, nccl_abi_ours[i].value,
                      nccl_abi_theirs[i].value);
}
END_TEST

START_TEST(a_configuration_begins_as_the_header_begins_it)
{
    unsigned char ours[256] = {0}, theirs[256] = {0};
    ck_assert_uint_eq(nccl_abi_our_config(ours, sizeof ours),
                      nccl_abi_their_config(theirs, sizeof theirs));
    ck_assert_mem_eq(ours, theirs, sizeof ours);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {our_declarations_are_those_of_the_header,
                                  a_configuration_begins_as_the_header_begins_it};
    return run_suite("nccl_abi", tests, sizeof tests / sizeof *tests);
}
