/* SPDX-License-Identifier: Apache-2.0 */
/* Regions: what is refused, what a pin keeps, and that mappings, fds and quota come back. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "worker/buffer/region.h"

static struct loop *loop;
static struct chores *chores;
static struct region_quota quota;
static struct region_table table;
static int last_status, n_replies;
static char last_text[256];

static void on_opened(void *data, uint32_t id, int status, const char *text)
{
    (void)data;
    (void)id;
    last_status = status;
    n_replies++;
    snprintf(last_text, sizeof last_text, "%s", text);
}

static void setup(void)
{
    loop = loop_new();
    chores = chores_new(loop);
    quota = (struct region_quota){.limit_bytes = 1 << 20};
    region_table_init(&table, chores, &quota);
    n_replies = 0;
}

static int count_mappings(void)
{
    char line[512];
    int n = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        n += strstr(line, "/memfd:gradd-test") != NULL;
    fclose(maps);
    return n;
}

static int count_fds(void)
{
    int n = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory))
        n++;
    closedir(directory);
    return n;
}

static void teardown(void)
{
    region_table_deinit(&table);
    chores_free(chores);
    loop_free(loop);
    ck_assert_uint_eq(quota.used_bytes, 0);
    ck_assert_int_eq(count_mappings(), 0);
}

static int sealed(size_t bytes, int seals)
{
    int fd = memfd_create("gradd-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    if (seals)
        ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static int open_region(uint32_t id, int fd, uint64_t bytes)
{
    int before = n_replies;
    region_open(&table, id, fd, bytes, on_opened, NULL);
    while (n_replies == before)
        loop_step(loop, true);
    return last_status;
}

START_TEST(sealed_memfd_is_mapped_and_shared)
{
    const char *text;
    struct region *region;
    setup();
    int fd = sealed(8192, F_SEAL_SHRINK), mine = dup(fd);
    ck_assert_int_eq(open_region(1, fd, 8192), GRADD_OK);
    uint8_t *base = region_pin(&table, 1, 100, 8092, &region, &text);
    ck_assert_ptr_nonnull(base);
    base[0] = 42;
    uint8_t byte;
    ck_assert_int_eq(pread(mine, &byte, 1, 100), 1);
    ck_assert_uint_eq(byte, 42);
    close(mine);
    region_unpin(region);
    teardown();
}
END_TEST

START_TEST(unsealed_small_or_foreign_descriptors_are_refused)
{
    setup();
    int fds = count_fds();
    ck_assert_int_eq(open_region(1, sealed(4096, 0), 4096), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(last_text, "F_SEAL_SHRINK"));
    ck_assert_int_eq(open_region(1, sealed(4096, F_SEAL_SHRINK), 4097), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(last_text, "4096"));
    ck_assert_int_eq(open_region(1, open("/dev/zero", O_RDWR), 4096), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(last_text, "not a memfd"));
    ck_assert_int_eq(open_region(0, sealed(4096, F_SEAL_SHRINK), 4096), GRADD_ERR_INVALID);
    ck_assert_int_eq(open_region(1, sealed(4096, F_SEAL_SHRINK), 0), GRADD_ERR_INVALID);
    ck_assert_int_eq(open_region(1, sealed(4096, F_SEAL_SHRINK | F_SEAL_WRITE), 4096),
                     GRADD_ERR_NO_MEMORY);
    ck_assert_int_eq(count_fds(), fds);
    teardown();
}
END_TEST

START_TEST(quota_counts_every_region_and_comes_back)
{
    setup();
    ck_assert_int_eq(open_region(1, sealed(1 << 20, F_SEAL_SHRINK), 1 << 20), GRADD_OK);
    ck_assert_int_eq(open_region(2, sealed(4096, F_SEAL_SHRINK), 4096), GRADD_ERR_NO_MEMORY);
    ck_assert_ptr_nonnull(strstr(last_text, "job_memory_bytes"));
    ck_assert_int_eq(open_region(1, sealed(4096, F_SEAL_SHRINK), 4096), GRADD_ERR_INVALID);
    ck_assert(region_close(&table, 1, NULL, NULL));
    ck_assert(!region_close(&table, 1, NULL, NULL));
    while (quota.used_bytes > 0)
        loop_step(loop, true);
    ck_assert_int_eq(open_region(2, sealed(4096, F_SEAL_SHRINK), 4096), GRADD_OK);
    teardown();
}
END_TEST

START_TEST(every_use_is_checked_against_the_size)
{
    const char *text = "";
    struct region *region;
    setup();
    ck_assert_int_eq(open_region(1, sealed(4096, F_SEAL_SHRINK), 4096), GRADD_OK);
    ck_assert_ptr_null(region_pin(&table, 2, 0, 1, &region, &text));
    ck_assert_ptr_null(region_pin(&table, 1, 0, 4097, &region, &text));
    ck_assert_ptr_null(region_pin(&table, 1, 4096, 1, &region, &text));
    ck_assert_ptr_null(region_pin(&table, 1, UINT64_MAX, 2, &region, &text));
    ck_assert_ptr_null(region_pin(&table, 1, 2, UINT64_MAX, &region, &text));
    ck_assert_ptr_nonnull(strstr(text, "beyond the end"));
    teardown();
}
END_TEST

START_TEST(pin_outlives_close_and_table)
{
    const char *text;
    struct region *region;
    setup();
    ck_assert_int_eq(open_region(1, sealed(4096, F_SEAL_SHRINK), 4096), GRADD_OK);
    uint8_t *base = region_pin(&table, 1, 0, 4096, &region, &text);
    region_table_deinit(&table);
    base[4095] = 1; /* still mapped */
    ck_assert_uint_eq(quota.used_bytes, 4096);
    region_unpin(region);
    teardown();
}
END_TEST

START_TEST(table_may_go_while_a_region_opens)
{
    setup();
    region_open(&table, 1, sealed(1 << 20, F_SEAL_SHRINK), 1 << 20, on_opened, NULL);
    teardown();
    ck_assert_int_eq(n_replies, 0);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        sealed_memfd_is_mapped_and_shared,
        unsealed_small_or_foreign_descriptors_are_refused,
        quota_counts_every_region_and_comes_back,
        every_use_is_checked_against_the_size,
        pin_outlives_close_and_table,
        table_may_go_while_a_region_opens,
    };
    return run_suite("region", tests, sizeof tests / sizeof *tests);
}
