/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A forked child holds nothing of its parent's membership, and says so.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "context.h"
#include "fake_node.h"
#include "run_suite.h"

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition))                                                                          \
            _exit(__LINE__ % 256 ? __LINE__ % 256 : 1);                                            \
    } while (0)

/* Runs in the child: the exit status is the line of what did not hold. */
static void child(struct gradd *g, const int *fds, size_t n_fds, gradd_handle handle, float *memory)
{
    for (size_t i = 0; i < n_fds; i++)
        EXPECT(fcntl(fds[i], F_GETFD) < 0 && errno == EBADF);
    EXPECT(gradd_barrier(g, 0) == GRADD_ERR_FORKED);
    EXPECT(strstr(gradd_error(), "fork"));
    EXPECT(gradd_wait(g, handle, -1) == GRADD_ERR_FORKED);
    EXPECT(gradd_test(g, handle) == GRADD_ERR_FORKED);
    EXPECT(gradd_release(g, handle) == GRADD_ERR_FORKED);
    EXPECT(gradd_alloc(g, 1) == NULL);
    EXPECT(gradd_free(g, memory) == GRADD_ERR_FORKED);
    EXPECT(gradd_fd(g) == GRADD_ERR_FORKED);
    EXPECT(gradd_progress(g) == GRADD_ERR_FORKED);
    EXPECT(gradd_rank(g) == GRADD_ERR_FORKED);
    EXPECT(gradd_submit(g, NULL, 0) == GRADD_ERR_FORKED);
    gradd_shutdown(g);
    _exit(0);
}

START_TEST(the_child_is_inert_and_the_parent_goes_on)
{
    struct fake_node node;
    fake_open(&node);
    fake_join(&node, 4, 1 << 30);
    fake_answer_region(&node, 1, GRADD_OK, "");
    float *memory = gradd_alloc(node.g, 4000);
    int fd;
    fake_expect(&node.worker, PB__ENVELOPE__BODY_REGISTER, &fd);
    close(fd);
    const int fds[] = {node.g->daemon.fd, node.g->worker.fd, node.g->wake_fd, gradd_fd(node.g)};
    gradd_handle handle =
        gradd_allreduce_async(node.g, "a", memory, memory, 4, GRADD_F32, GRADD_SUM);
    uint64_t id = fake_expect(&node.worker, PB__ENVELOPE__BODY_SUBMIT_BATCH, NULL)
                      ->submit_batch->submits[0]
                      ->id;
    pid_t pid = fork();
    if (pid == 0)
        child(node.g, fds, sizeof fds / sizeof *fds, handle, memory);
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child stopped at line %d",
                  WEXITSTATUS(status));
    /* Nothing was said in the parent's name, and its memory is still there. */
    fake_expect_nothing(&node.worker);
    fake_expect_nothing(&node.daemon);
    memory[0] = 1;
    fake_complete(&node, id, GRADD_OK, "");
    ck_assert_int_eq(gradd_wait(node.g, handle, -1), GRADD_OK);
    fake_hang_up(&node.daemon);
    gradd_shutdown(node.g);
    fake_close(&node);
}
END_TEST

START_TEST(the_child_may_start_anew)
{
    const struct gradd_options options = {.struct_size = sizeof options, .size = 1};
    struct gradd *g;
    ck_assert_int_eq(gradd_init(&options, &g), GRADD_OK);
    pid_t pid = fork();
    if (pid == 0) {
        struct gradd *own;
        EXPECT(gradd_barrier(g, 0) == GRADD_ERR_FORKED);
        EXPECT(gradd_init(&options, &own) == GRADD_OK);
        EXPECT(gradd_barrier(own, 0) == GRADD_OK);
        gradd_shutdown(own);
        gradd_shutdown(g);
        _exit(0);
    }
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child stopped at line %d",
                  WEXITSTATUS(status));
    ck_assert_int_eq(gradd_barrier(g, 0), GRADD_OK);
    gradd_shutdown(g);
}
END_TEST

int main(void)
{
    const TTest *tests[] = {the_child_is_inert_and_the_parent_goes_on, the_child_may_start_anew};
    return run_suite("client/fork", tests, sizeof tests / sizeof *tests);
}
