/* SPDX-License-Identifier: Apache-2.0 */
/* The way to a host: the command line of the remote shell, and why it failed, in words. */
#include "remote.h"

#include <string.h>

#include "run_suite.h"

static const char *joined(const struct remote_shell *shell, const char *name, bool is_local)
{
    static char text[2048];
    struct host host = {0};
    snprintf(host.name, sizeof host.name, "%s", name);
    char **words = remote_words(shell, &host, is_local);
    ck_assert_ptr_nonnull(words);
    text[0] = '\0';
    for (char **w = words; *w; w++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s|", *w);
    remote_words_free(words);
    return text;
}

START_TEST(ssh_asks_nothing_and_takes_the_host_for_no_option)
{
    const struct remote_shell shell = {
        .program = "/opt/it's/gradrun", .port = 2222, .identity_file = "k"};
    const char *words = joined(&shell, "me@b", false);
    ck_assert_ptr_eq(strstr(words, "ssh|"), words);
    ck_assert_ptr_nonnull(strstr(words, "|-oBatchMode=yes|"));
    ck_assert_ptr_nonnull(strstr(words, "|-p|2222|-i|k|--|me@b|"));
    ck_assert_ptr_nonnull(strstr(words, "|exec '/opt/it'\\''s/gradrun' --agent|"));
}
END_TEST

START_TEST(an_ssh_gets_no_option_that_it_does_not_know)
{
    static const struct {
        enum ssh_age age;
        bool has_command, has_type;
    } rows[] = {{SSH_OLD, false, false}, {SSH_7_6, true, false}, {SSH_8_7, true, true}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const struct remote_shell shell = {.program = "/g", .ssh_age = rows[i].age};
        const char *words = joined(&shell, "b", false);
        ck_assert_int_eq(strstr(words, "|-oRemoteCommand=none|") != NULL, rows[i].has_command);
        ck_assert_int_eq(strstr(words, "|-oSessionType=default|") != NULL, rows[i].has_type);
        ck_assert_ptr_nonnull(strstr(words, "|--|b|exec '/g' --agent|"));
    }
}
END_TEST

START_TEST(another_remote_shell_gets_host_and_command)
{
    const struct remote_shell shell = {.program = "/g", .command = " rsh  -l me "};
    ck_assert_str_eq(joined(&shell, "b", false), "rsh|-l|me|b|exec '/g' --agent|");
}
END_TEST

START_TEST(this_host_needs_none)
{
    const struct remote_shell shell = {.program = "/g", .command = "rsh", .port = 2};
    ck_assert_str_eq(joined(&shell, "localhost", true), "/g|--agent|");
}
END_TEST

static void expect(struct remote_loss loss, const char *sentence)
{
    char text[1024];
    loss.host = "b";
    loss.program = "/g";
    remote_explain(&loss, text, sizeof text);
    ck_assert_str_eq(text, sentence);
}

START_TEST(what_ssh_says_becomes_what_to_do)
{
    const struct ending ssh_failed = {.code = 255};
    expect((struct remote_loss){.is_ssh = true,
                                .ending = ssh_failed,
                                .words = "No ED25519 host key is known for b and you have "
                                         "requested strict checking.\r\n"
                                         "Host key verification failed.\r\n"},
           "ssh does not know its host key: connect once by hand, or add it to known_hosts");
    expect((struct remote_loss){.is_ssh = true,
                                .ending = ssh_failed,
                                .words = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\r\n"
                                         "Host key verification failed.\r\n"},
           "its host key is not the one that ssh knows: if the host was set up anew, ssh-keygen "
           "-R removes the old key; else it may be another machine");
    expect(
        (struct remote_loss){.is_ssh = true,
                             .ending = ssh_failed,
                             .words = "ssh: connect to host b port 22: Connection timed out\r\n"},
        "it cannot be reached: no answer within 10 s");
    expect((struct remote_loss){.is_ssh = true,
                                .ending = ssh_failed,
                                .words = "ssh: Could not resolve hostname b: Temporary failure in "
                                         "name resolution\r\n"},
           "its name cannot be looked up: no name server answers (/etc/resolv.conf); an address "
           "needs none");
}
END_TEST

START_TEST(slots_behind_a_bare_address_are_suspected)
{
    char text[1024];
    const struct remote_loss loss = {.is_ssh = true,
                                     .host = "fd00::5:2",
                                     .program = "/g",
                                     .ending = {.code = 255},
                                     .words = "connect to host: No route to host\r\n"};
    remote_explain(&loss, text, sizeof text);
    ck_assert_str_eq(text, "it cannot be reached: no route to host; slots behind an address of "
                           "IPv6 need brackets: [ADDRESS]:SLOTS");
}
END_TEST

START_TEST(what_is_not_known_is_passed_on)
{
    expect((struct remote_loss){.is_ssh = true,
                                .ending = {.code = 255},
                                .words = "first\r\nsomething new\r\n\r\n"},
           "no agent answered: ssh exited with code 255; it said: something new");
    expect((struct remote_loss){.ending = {.code = 3}, .words = ""},
           "no agent answered: the remote shell exited with code 3");
    expect(
        (struct remote_loss){
            .is_local = true, .has_greeted = true, .ending = {.signal = 9}, .words = ""},
        "the connection to its agent ended: its agent was killed by signal 9 (SIGKILL)");
    /* The words of ssh are no explanation when the program itself said them. */
    expect(
        (struct remote_loss){.is_ssh = true, .ending = {.code = 1}, .words = "Permission denied\n"},
        "no agent answered: ssh exited with code 1; it said: Permission denied");
}
END_TEST

START_TEST(a_program_that_is_not_there_is_named)
{
    expect((struct remote_loss){.is_ssh = true,
                                .ending = {.code = 127},
                                .words = "bash: line 1: /g: No such file or directory\n"},
           "/g is not there (bash: line 1: /g: No such file or directory): install gradd at the "
           "same path on all hosts");
    expect((struct remote_loss){.is_ssh = true,
                                .ending = {.code = 127},
                                .words = "/g: error while loading shared libraries: libx.so.1: "
                                         "cannot open shared object file\n"},
           "gradrun is there, but not a library that it needs (/g: error while loading shared "
           "libraries: libx.so.1: cannot open shared object file)");
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        ssh_asks_nothing_and_takes_the_host_for_no_option,
        an_ssh_gets_no_option_that_it_does_not_know,
        another_remote_shell_gets_host_and_command,
        this_host_needs_none,
        what_ssh_says_becomes_what_to_do,
        slots_behind_a_bare_address_are_suspected,
        what_is_not_known_is_passed_on,
        a_program_that_is_not_there_is_named,
    };
    return run_suite("remote", tests, sizeof tests / sizeof *tests);
}
