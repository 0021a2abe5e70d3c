/* SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void explain_missing(const char *name, bool is_there, char *sentence, size_t bytes)
{
    char directory[4096];
    if (!strchr(name, '/'))
        snprintf(sentence, bytes,
                 is_there ? "it is not in PATH; for the one in this directory: ./%s"
                          : "there is no such program in PATH",
                 name);
    else if (is_there)
        snprintf(sentence, bytes,
                 "the file is there, but the interpreter that it names (its first line, or its "
                 "dynamic loader) is not");
    else if (name[0] != '/' && getcwd(directory, sizeof directory))
        snprintf(sentence, bytes, "there is no such file, seen from %s", directory);
    else
        snprintf(sentence, bytes, "there is no such file");
}

void program_explain(const char *name, int rc, char *sentence, size_t bytes)
{
    struct stat info;
    bool is_there = stat(name, &info) == 0, is_path = strchr(name, '/') != NULL;
    if (rc == -ENOENT)
        explain_missing(name, is_there, sentence, bytes);
    else if (rc == -EACCES && is_path && is_there && S_ISDIR(info.st_mode))
        snprintf(sentence, bytes, "it is a directory");
    else if (rc == -EACCES && is_path && is_there && !(info.st_mode & 0111))
        snprintf(sentence, bytes,
                 "it is not executable: chmod +x it, or name its interpreter before it");
    else if (rc == -E2BIG)
        snprintf(sentence, bytes, "its arguments and environment are too long for the kernel");
    else
        snprintf(sentence, bytes, "%s", strerror(-rc));
}
