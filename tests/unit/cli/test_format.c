/* SPDX-License-Identifier: Apache-2.0 */
/* Values as people read them; strings of others made harmless; the two writers. */
#include "format.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "run_suite.h"

static void expect_value(struct value value, const char *expected)
{
    char *text = format_value(&value);
    ck_assert_pstr_eq(text, expected);
    free(text);
}

static void expect_safe(const char *text, const char *expected)
{
    char *safe = format_safe(text);
    ck_assert_pstr_eq(safe, expected);
    free(safe);
}

START_TEST(numbers_have_their_unit)
{
    expect_value(value_count(UINT64_MAX), "18446744073709551615");
    expect_value(value_bytes(0), "0 B");
    expect_value(value_bytes(1023), "1023 B");
    expect_value(value_bytes(1536), "1.5 KiB");
    expect_value(value_bytes(200 << 20), "200 MiB");
    expect_value(value_bytes(UINT64_MAX), "16.0 EiB");
    expect_value(value_us(0), "0 s");
    expect_value(value_us(12.4), "12 us");
    expect_value(value_us(12345), "12.3 ms");
    expect_value(value_seconds(1.25), "1.2 s");
    expect_value(value_seconds(125), "2 min 05 s");
    expect_value(value_seconds(7260), "2 h 01 min");
    expect_value(value_seconds(200000), "2 d 07 h");
    expect_value(value_bool(true), "yes");
}
END_TEST

START_TEST(what_is_empty_is_a_dash)
{
    expect_value(value_text(""), "-");
    expect_value(value_text(NULL), "-");
    expect_value(value_ranks(NULL, 0), "-");
    expect_value(value_texts(NULL, 0), "-");
}
END_TEST

START_TEST(ranks_in_a_row_are_a_range)
{
    const uint32_t ranks[] = {0, 1, 2, 3, 7, 9, 10};
    expect_value(value_ranks(ranks, 7), "0-3, 7, 9, 10");
    expect_value(value_ranks(ranks, 1), "0");
    const uint32_t far[] = {UINT32_MAX - 2, UINT32_MAX - 1, UINT32_MAX};
    expect_value(value_ranks(far, 3), "4294967293-4294967295");
}
END_TEST

START_TEST(strings_of_others_cannot_drive_the_terminal)
{
    expect_safe("fc.weight", "fc.weight");
    expect_safe("gr\xc3\xb6\xc3\x9f"
                "e",
                "gr\xc3\xb6\xc3\x9f"
                "e");
    expect_safe("\x1b[2J\a\n", "\\x1b[2J\\x07\\x0a");
    expect_safe("\xc2\x9b"
                "31m",
                "\\xc2\\x9b31m");
    expect_safe("\xe2\x80\xae"
                "cba",
                "\\xe2\\x80\\xaecba");
}
END_TEST

START_TEST(bytes_that_are_no_utf8_are_shown_as_bytes)
{
    expect_safe("a\xff", "a\\xff");
    expect_safe("\xc3", "\\xc3");
    expect_safe("\xc0\xaf", "\\xc0\\xaf");
    expect_safe("\xed\xa0\x80", "\\xed\\xa0\\x80");
    expect_safe("\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80");
    expect_safe("\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80");
}
END_TEST

START_TEST(width_counts_characters)
{
    ck_assert_uint_eq(format_width(""), 0);
    ck_assert_uint_eq(format_width("gr\xc3\xb6\xc3\x9f"
                                   "e"),
                      5);
}
END_TEST

static const struct column columns[] = {{"name", "NAME"}, {"bytes", "BYTES"}};

/* The same statements to either writer. */
static char *say(bool is_json)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    struct writer *w = is_json ? writer_json_new(stream, "test", true) : writer_text_new(stream);
    char *const lines[] = {(char *)"one", (char *)"two"};
    writer_field(w, "job", "job", value_text("a\x1b"));
    writer_field(w, "none", "none", value_text(""));
    writer_field(w, "late_us", "late", value_us(1500));
    writer_field(w, "odd", "odd", value_us(NAN));
    writer_field(w, "problems", "problems", value_texts(lines, 2));
    writer_table_begin(w, "rows", "rows", columns, 2);
    writer_row(w, (const struct value[]){value_text("x"), value_bytes(2048)});
    writer_row(w, (const struct value[]){value_text("longer"), value_bytes(1)});
    writer_table_end(w);
    writer_table_begin(w, "empty", "empty", columns, 2);
    writer_table_end(w);
    writer_end(w);
    writer_free(w);
    fclose(stream);
    return text;
}

START_TEST(text_is_aligned_and_leaves_out_only_what_is_empty)
{
    char *text = say(false);
    ck_assert_pstr_eq(text, "job               a\\x1b\n"
                            "late              1.5 ms\n"
                            "odd               nan s\n"
                            "problems          one\n"
                            "                  two\n"
                            "\nrows\n"
                            "NAME      BYTES\n"
                            "x       2.0 KiB\n"
                            "longer      1 B\n");
    free(text);
}
END_TEST

START_TEST(json_has_every_field_in_base_units)
{
    char *text = say(true);
    ck_assert_pstr_eq(text, "{\"schema\":1,\"command\":\"test\",\"job\":\"a\\\\x1b\",\"none\":\"\","
                            "\"late_us\":1500.0,\"odd\":null,\"problems\":[\"one\",\"two\"],"
                            "\"rows\":[{\"name\":\"x\",\"bytes\":2048},"
                            "{\"name\":\"longer\",\"bytes\":1}],\"empty\":[]}\n");
    free(text);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        numbers_have_their_unit,
        what_is_empty_is_a_dash,
        ranks_in_a_row_are_a_range,
        strings_of_others_cannot_drive_the_terminal,
        bytes_that_are_no_utf8_are_shown_as_bytes,
        width_counts_characters,
        text_is_aligned_and_leaves_out_only_what_is_empty,
        json_has_every_field_in_base_units,
    };
    return run_suite("format", tests, sizeof tests / sizeof *tests);
}
