/* SPDX-License-Identifier: Apache-2.0 */
/* Output is cut into whole lines wherever the reads happen to cut it. */
#include "lines.h"

#include <stdlib.h>
#include <string.h>

#include "run_suite.h"

/* The pieces handed on, each followed by a '|'. */
static char got[512 * 1024];
static size_t n_got, n_pieces, longest;

static void on_line(void *owner, const char *line, size_t bytes)
{
    (void)owner;
    memcpy(got + n_got, line, bytes);
    n_got += bytes;
    got[n_got++] = '|';
    got[n_got] = '\0';
    n_pieces++;
    longest = bytes > longest ? bytes : longest;
}

static struct lines lines;

static void start(void)
{
    n_got = n_pieces = longest = 0;
    got[0] = '\0';
    lines_init(&lines, on_line, NULL);
}

static void feed(const char *text)
{
    lines_feed(&lines, text, strlen(text));
}

START_TEST(a_line_is_handed_on_when_its_end_arrives)
{
    start();
    feed("one");
    ck_assert_str_eq(got, "");
    feed(" line\ntwo\nthr");
    ck_assert_str_eq(got, "one line\n|two\n|");
}
END_TEST

START_TEST(the_last_line_needs_no_newline)
{
    start();
    feed("a\nb");
    lines_finish(&lines);
    ck_assert_str_eq(got, "a\n|b|");
    lines_finish(&lines);
    ck_assert_str_eq(got, "a\n|b|");
}
END_TEST

START_TEST(a_lone_carriage_return_ends_a_line)
{
    start();
    feed("10%\r20%\r30%\n");
    ck_assert_str_eq(got, "10%\r|20%\r|30%\n|");
}
END_TEST

START_TEST(carriage_return_and_newline_are_one_end)
{
    start();
    feed("dos\r");
    ck_assert_str_eq(got, "");
    feed("\nnext\r\n");
    ck_assert_str_eq(got, "dos\r\n|next\r\n|");
}
END_TEST

START_TEST(a_very_long_line_is_cut_and_nothing_is_lost)
{
    start();
    enum { BYTES = 3 * LINES_MAX + 10 };
    char *text = malloc(BYTES);
    memset(text, 'x', BYTES);
    text[BYTES - 1] = '\n';
    for (size_t at = 0; at < BYTES; at += 1000)
        lines_feed(&lines, text + at, BYTES - at < 1000 ? BYTES - at : 1000);
    free(text);
    ck_assert_uint_eq(n_pieces, 4);
    ck_assert_uint_eq(n_got, BYTES + n_pieces);
    ck_assert_uint_le(longest, LINES_MAX);
}
END_TEST

START_TEST(any_cutting_of_the_input_gives_the_same_lines)
{
    static const char input[] = "a\n\nbc\r\nd\re\n\rf\0g\nlast";
    start();
    lines_feed(&lines, input, sizeof input - 1);
    lines_finish(&lines);
    char *whole = malloc(n_got);
    size_t n_whole = n_got;
    memcpy(whole, got, n_got);
    for (size_t cut = 1; cut < sizeof input - 1; cut++) {
        start();
        for (size_t at = 0; at < sizeof input - 1; at += cut) {
            size_t left = sizeof input - 1 - at;
            lines_feed(&lines, input + at, left < cut ? left : cut);
        }
        lines_finish(&lines);
        ck_assert_uint_eq(n_got, n_whole);
        ck_assert_mem_eq(got, whole, n_whole);
    }
    free(whole);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_line_is_handed_on_when_its_end_arrives,    the_last_line_needs_no_newline,
        a_lone_carriage_return_ends_a_line,          carriage_return_and_newline_are_one_end,
        a_very_long_line_is_cut_and_nothing_is_lost, any_cutting_of_the_input_gives_the_same_lines,
    };
    return run_suite("lines", tests, sizeof tests / sizeof *tests);
}
