/* SPDX-License-Identifier: Apache-2.0 */
#include "remote.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { EXIT_NOT_EXECUTABLE = 126, EXIT_NOT_FOUND = 127, EXIT_SSH = 255 };

/* What OpenSSH's client says (version 9), and what there is to do; the first that is found. */
static const struct known {
    const char *words, *sentence;
} known[] = {
    {"REMOTE HOST IDENTIFICATION HAS CHANGED",
     "its host key is not the one that ssh knows: if the host was set up anew, ssh-keygen -R "
     "removes the old key; else it may be another machine"},
    {"Host key verification failed",
     "ssh does not know its host key: connect once by hand, or add it to known_hosts"},
    {"Permission denied",
     "ssh is not let in without a password: set up a key (ssh-copy-id, --ssh-identity-file)"},
    {"Too many authentication failures",
     "ssh is not let in without a password: name its key with --ssh-identity-file"},
    {"Temporary failure in name resolution",
     "its name cannot be looked up: no name server answers (/etc/resolv.conf); an address needs "
     "none"},
    {"Could not resolve hostname", "there is no host of this name"},
    {"Connection refused", "nothing answers at its ssh port: is sshd running (--ssh-port)?"},
    {"Connection timed out", "it cannot be reached: no answer within 10 s"},
    {"No route to host", "it cannot be reached: no route to host"},
    {"Network is unreachable", "it cannot be reached: the network is unreachable"},
    {"not responding", "the connection to it was lost: no answer for 15 s"},
};

/* The last line of text that is not empty. */
static void last_line(const char *text, char *line, size_t bytes)
{
    const char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        end--;
    const char *begin = end;
    while (begin > text && begin[-1] != '\n' && begin[-1] != '\r')
        begin--;
    snprintf(line, bytes, "%.*s", (int)(end - begin), begin);
}

static const char *find_known(const char *words)
{
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strstr(words, known[i].words))
            return known[i].sentence;
    return NULL;
}

/* Without brackets the slots are taken for the end of the address. */
static const char *hint(const char *host)
{
    return strchr(host, ':') ? "; slots behind an address of IPv6 need brackets: [ADDRESS]:SLOTS"
                             : "";
}

void remote_explain(const struct remote_loss *loss, char *sentence, size_t bytes)
{
    const char *reason =
        loss->is_ssh && ending_exit_code(loss->ending) == EXIT_SSH ? find_known(loss->words) : NULL;
    const char *what = loss->is_local ? "its agent" : loss->is_ssh ? "ssh" : "the remote shell";
    char how[64], line[512];
    ending_describe(loss->ending, how, sizeof how);
    last_line(loss->words, line, sizeof line);
    if (reason)
        snprintf(sentence, bytes, "%s%s", reason, hint(loss->host));
    else if (!loss->has_greeted && strstr(line, "error while loading shared libraries"))
        snprintf(sentence, bytes, "gradrun is there, but not a library that it needs (%s)", line);
    else if (!loss->has_greeted && loss->ending.code == EXIT_NOT_FOUND)
        snprintf(sentence, bytes,
                 "%s is not there (%s): install gradd at the same path on all hosts", loss->program,
                 line[0] ? line : "exit code 127");
    else if (!loss->has_greeted && loss->ending.code == EXIT_NOT_EXECUTABLE)
        snprintf(sentence, bytes, "%s cannot be run there (%s)", loss->program,
                 line[0] ? line : "exit code 126");
    else
        snprintf(sentence, bytes, "%s: %s %s%s%s",
                 loss->has_greeted ? "the connection to its agent ended" : "no agent answered",
                 what, how, line[0] ? "; it said: " : "", line);
}
