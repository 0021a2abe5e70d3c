/* SPDX-License-Identifier: Apache-2.0 */
/* What proto/cuda_abi.h declares is what <cuda.h> declares. Built where a CUDA Toolkit is found. */
#include "cuda_abi_list.h"
#include "run_suite.h"

START_TEST(our_declarations_are_those_of_the_toolkit)
{
    ck_assert_uint_eq(cuda_abi_ours_count, cuda_abi_theirs_count);
    for (size_t i = 0; i < cuda_abi_ours_count; i++)
        ck_assert_msg(cuda_abi_ours[i].value == cuda_abi_theirs[i].value,
                      "%s: %lld, <cuda.h>: %lld", cuda_abi_ours[i].name, cuda_abi_ours[i].value,
                      cuda_abi_theirs[i].value);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {our_declarations_are_those_of_the_toolkit};
    return run_suite("cuda_abi", tests, sizeof tests / sizeof *tests);
}
