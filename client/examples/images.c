/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the digits: plain CSV of whole numbers, refused with file and line when it is anything
 * else, because a wrong pixel would only show as a worse accuracy. */
#include "images.h"

#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PIXEL = 16, TEST_EVERY = 5, MAX_LINE = 1024 };

/* One number of 0..max at *text, and the separator behind it; -1 when there is none. */
static int next_number(char **text, long max)
{
    char *end;
    long value = strtol(*text, &end, 10);
    if (end == *text || value < 0 || value > max || !strchr(",\r\n", *end))
        return -1;
    *text = *end == ',' ? end + 1 : end;
    return (int)value;
}

static int parse_line(char *line, struct image *image)
{
    for (int i = 0; i < N_PIXELS; i++) {
        int pixel = next_number(&line, MAX_PIXEL);
        if (pixel < 0)
            return -1;
        image->pixel[i] = (float)pixel / MAX_PIXEL;
    }
    image->digit = next_number(&line, N_CLASSES - 1);
    return image->digit < 0 || (*line && !strchr("\r\n", *line)) ? -1 : 0;
}

static void append(struct image **list, size_t *n, const struct image *image)
{
    if ((*n & (*n - 1)) == 0) { /* capacity is the next power of two */
        struct image *grown = reallocarray(*list, *n ? *n * 2 : 1, sizeof **list);
        if (!grown)
            err(EXIT_FAILURE, "images");
        *list = grown;
    }
    (*list)[(*n)++] = *image;
}

void images_load(struct images *images, const char *path)
{
    FILE *file = fopen(path, "re");
    if (!file)
        err(EXIT_FAILURE, "%s", path);
    *images = (struct images){0};
    char line[MAX_LINE];
    for (size_t n = 0; fgets(line, sizeof line, file); n++) {
        struct image image;
        if (parse_line(line, &image))
            errx(EXIT_FAILURE, "%s:%zu: not %d pixels of 0..%d and a digit", path, n + 1, N_PIXELS,
                 MAX_PIXEL);
        if (n % TEST_EVERY == TEST_EVERY - 1)
            append(&images->test, &images->n_test, &image);
        else
            append(&images->train, &images->n_train, &image);
    }
    if (ferror(file))
        err(EXIT_FAILURE, "%s", path);
    if (images->n_test == 0)
        errx(EXIT_FAILURE, "%s: fewer than %d images", path, TEST_EVERY);
    fclose(file);
}

void images_free(struct images *images)
{
    free(images->train);
    free(images->test);
    *images = (struct images){0};
}
