/* SPDX-License-Identifier: Apache-2.0 */
#include "remote.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "program.h"

enum { WORDS_MAX = 64 };

struct words {
    char **list;
    size_t n;
    bool has_failed;
};

static void add(struct words *words, const char *text, size_t length)
{
    char *copy = words->n < WORDS_MAX - 1 ? strndup(text, length) : NULL;
    if (copy)
        words->list[words->n++] = copy;
    else
        words->has_failed = true;
}

static void add_word(struct words *words, const char *text)
{
    add(words, text, strlen(text));
}

/* For the user's shell on the other side: in single quotes, whatever the path holds. */
static void add_shell_command(struct words *words, const char *program)
{
    char command[4 * 4096 + 32] = "exec '";
    size_t n = strlen(command);
    for (const char *p = program; *p && n < sizeof command - 16; p++) {
        if (*p == '\'')
            n += (size_t)snprintf(command + n, sizeof command - n, "'\\''");
        else
            command[n++] = *p;
    }
    snprintf(command + n, sizeof command - n, "' --agent");
    add_word(words, command);
}

static void add_ssh(struct words *words, const struct remote_shell *shell)
{
    for (const char *const *word = ssh_words(shell->ssh_age); *word; word++)
        add_word(words, *word);
    if (shell->port) {
        char port[16];
        snprintf(port, sizeof port, "%u", shell->port);
        add_word(words, "-p");
        add_word(words, port);
    }
    if (shell->identity_file) {
        add_word(words, "-i");
        add_word(words, shell->identity_file);
    }
    add_word(words, "--");
}

char **remote_words(const struct remote_shell *shell, const struct host *host, bool is_local)
{
    struct words words = {.list = calloc(WORDS_MAX, sizeof *words.list)};
    if (!words.list)
        return NULL;
    if (is_local) {
        add_word(&words, shell->program);
        add_word(&words, "--agent");
    } else {
        const char *at = shell->command ? shell->command + strspn(shell->command, " \t") : "";
        while (*at) {
            size_t length = strcspn(at, " \t");
            add(&words, at, length);
            at += length;
            at += strspn(at, " \t");
        }
        if (!shell->command)
            add_ssh(&words, shell);
        add_word(&words, host->name);
        add_shell_command(&words, shell->program);
    }
    if (words.has_failed) {
        remote_words_free(words.list);
        return NULL;
    }
    return words.list;
}

void remote_words_free(char **words)
{
    for (char **w = words; w && *w; w++)
        free(*w);
    free(words);
}

static void close_pair(int pair[2])
{
    for (int i = 0; i < 2; i++)
        if (pair[i] >= 0)
            close(pair[i]);
}

static int spawn(struct remote *remote, const struct remote_shell *shell, char **words)
{
    int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1};
    int rc = pipe2(in, O_CLOEXEC) < 0 || pipe2(out, O_CLOEXEC) < 0 || pipe2(err, O_CLOEXEC) < 0
                 ? -errno
                 : 0;
    struct spawn spawn = {
        .argv = words,
        .envp = environ,
        .stdio = {in[0], out[1], err[1]},
        .keep = {-1, -1, -1},
        .mask = shell->mask,
    };
    if (rc == 0)
        rc = process_spawn(&spawn, &remote->pid);
    if (rc < 0) {
        close_pair(in);
        close_pair(out);
        close_pair(err);
        return rc;
    }
    close(in[0]);
    close(out[1]);
    close(err[1]);
    sink_init_own(&remote->to, in[1]);
    inbox_init(&remote->from, out[0]);
    fcntl(err[0], F_SETFL, fcntl(err[0], F_GETFL) | O_NONBLOCK);
    remote->err = err[0];
    return 0;
}

static void explain(const struct remote *remote, const struct remote_shell *shell,
                    const char *program, int rc, char *error, size_t bytes)
{
    char why[4352] = "";
    if (!program)
        snprintf(why, sizeof why, "%s", strerror(-rc));
    else
        program_explain(program, rc, why, sizeof why);
    if (remote->is_local)
        snprintf(error, bytes, "cannot run its agent: %s", why);
    else if (shell->command)
        snprintf(error, bytes, "cannot run --rsh \"%s\": %s", shell->command, why);
    else
        snprintf(error, bytes,
                 "cannot run ssh: %s; install a client, or name another remote shell "
                 "with --rsh",
                 why);
}

int remote_start(struct remote *remote, const struct remote_shell *shell, char *error, size_t bytes)
{
    char **words = remote_words(shell, remote->host, remote->is_local);
    int rc = !words ? -ENOMEM : words[0] ? spawn(remote, shell, words) : -EINVAL;
    if (rc < 0)
        explain(remote, shell, words ? words[0] : NULL, rc, error, bytes);
    remote_words_free(words);
    return rc;
}

void remote_deinit(struct remote *remote)
{
    if (remote->to.is_own)
        sink_deinit(&remote->to);
    inbox_deinit(&remote->from);
    lookup_stop(&remote->lookup);
    if (remote->err >= 0)
        close(remote->err);
    remote->err = -1;
}

void remote_send(struct remote *remote, struct frame_writer *writer, const struct message *message)
{
    if (frame_put_message(writer, message) == 0)
        sink_push_bytes(&remote->to, writer->data, writer->n);
}

/* The end of what is said counts: forget the beginning. */
static void add_words(struct remote *remote, const char *text, size_t bytes)
{
    size_t room = sizeof remote->words - 1;
    if (bytes > room) {
        text += bytes - room;
        bytes = room;
    }
    if (remote->n_words + bytes > room) {
        size_t drop = remote->n_words + bytes - room;
        memmove(remote->words, remote->words + drop, remote->n_words - drop);
        remote->n_words -= drop;
    }
    for (size_t i = 0; i < bytes; i++)
        remote->words[remote->n_words++] = text[i] ? text[i] : '?';
    remote->words[remote->n_words] = '\0';
}

void remote_hear_words(struct remote *remote)
{
    char text[1024];
    ssize_t n = 1;
    while (remote->err >= 0 && n > 0) {
        n = read(remote->err, text, sizeof text);
        if (n > 0)
            add_words(remote, text, (size_t)n);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
            close(remote->err);
            remote->err = -1;
        }
    }
}

int remote_greet(struct remote *remote, char *error, size_t bytes)
{
    char line[512];
    while (inbox_next_line(&remote->from, line, sizeof line)) {
        size_t n = strlen(FRAME_GREETING);
        if (strncmp(line, FRAME_GREETING, n) != 0) {
            add_words(remote, line, strlen(line));
            add_words(remote, "\n", 1);
            continue;
        }
        if (strcmp(line + n, GRADD_VERSION) == 0) {
            remote->n_words = 0; /* what a login script said explains nothing that follows */
            remote->words[0] = '\0';
            return 1;
        }
        snprintf(error, bytes,
                 "gradrun there is version %.64s, here %s: install the same on all "
                 "hosts",
                 line + n, GRADD_VERSION);
        return -EPROTO;
    }
    return 0;
}
