/* SPDX-License-Identifier: Apache-2.0 */
/* One table each; parser, rows and help speak of the same names. */
#include "names.h"

#include <string.h>

#include <gradd/types.h>

struct name {
    const char *name;
    int value;
    size_t size;
};

static const struct name dtypes[] = {
    {"float32", GRADD_F32, 4},   {"float64", GRADD_F64, 8}, {"float16", GRADD_F16, 2},
    {"bfloat16", GRADD_BF16, 2}, {"int8", GRADD_I8, 1},     {"uint8", GRADD_U8, 1},
    {"int32", GRADD_I32, 4},     {"int64", GRADD_I64, 8},   {NULL, 0, 0},
};

static const struct name redops[] = {
    {"sum", GRADD_SUM, 0}, {"prod", GRADD_PROD, 0}, {"max", GRADD_MAX, 0},
    {"min", GRADD_MIN, 0}, {"avg", GRADD_AVG, 0},   {NULL, 0, 0},
};

static int from_name(const struct name *table, const char *name)
{
    for (; table->name; table++)
        if (strcmp(table->name, name) == 0)
            return table->value;
    return -1;
}

static const struct name *from_value(const struct name *table, int value)
{
    while (table->name && table->value != value)
        table++;
    return table;
}

int dtype_from_name(const char *name)
{
    return from_name(dtypes, name);
}

int redop_from_name(const char *name)
{
    return from_name(redops, name);
}

const char *dtype_name(int dtype)
{
    return from_value(dtypes, dtype)->name;
}

const char *redop_name(int redop)
{
    return from_value(redops, redop)->name;
}

size_t dtype_size(int dtype)
{
    return from_value(dtypes, dtype)->size;
}
