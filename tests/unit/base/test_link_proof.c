/* SPDX-License-Identifier: Apache-2.0 */
/* The proof of a data connection, byte for byte: the reference bytes come from Python's hmac. */
#include <errno.h>
#include <string.h>

#include "base/link_proof.h"
#include "run_suite.h"

static const uint8_t hello_bytes[LINK_HELLO_BYTES] = {
    0x47, 0x52, 0x41, 0x44, 0x44, 0x4c, 0x4e, 0x4b, /* GRADDLNK */
    0x01, 0x00, 0x02, 0x00, 0x03, 0x00, 0x04, 0x00, /* version, from, to, stream */
    0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, /* epoch */
    0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x4b, 0x4c, 0x4d, 0x4e, 0x4f,
    0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x8b, 0x8c, 0x8d, 0x8e, 0x8f,
};
static const uint8_t server_proof[LINK_PROOF_BYTES] = {
    0xe0, 0xf0, 0x25, 0x41, 0xd7, 0x60, 0x80, 0x9d, 0xb3, 0xe1, 0x1c, 0xe7, 0x7f, 0x58, 0x97, 0xfb,
    0x7e, 0x73, 0x28, 0x86, 0x0e, 0xd0, 0x3a, 0xe0, 0x31, 0x55, 0xed, 0x98, 0x3e, 0x02, 0x33, 0x95,
};
static const uint8_t client_proof[LINK_PROOF_BYTES] = {
    0xf8, 0x77, 0x40, 0x84, 0x1f, 0xc3, 0xa2, 0x51, 0xef, 0xe6, 0xe6, 0x13, 0xe3, 0x75, 0x19, 0x37,
    0xa1, 0x93, 0x06, 0x30, 0xa6, 0x90, 0x74, 0x5d, 0x7e, 0x6f, 0xc5, 0xa5, 0x16, 0x2a, 0xb5, 0x0a,
};

static uint8_t secret[LINK_SECRET_BYTES], nonce[LINK_NONCE_BYTES];
static uint8_t answer[LINK_ANSWER_BYTES], proof[LINK_PROOF_BYTES];

static void make_answer(void)
{
    for (int i = 0; i < LINK_SECRET_BYTES; i++)
        secret[i] = (uint8_t)i;
    for (int i = 0; i < LINK_NONCE_BYTES; i++)
        nonce[i] = (uint8_t)(0xc0 + i);
    ck_assert_int_eq(link_server_answer(secret, hello_bytes, nonce, answer), 0);
    ck_assert_int_eq(link_client_proof(secret, hello_bytes, answer, proof), 0);
}

START_TEST(a_hello_has_these_bytes)
{
    struct link_hello hello = {.version = LINK_VERSION,
                               .from_node = 2,
                               .to_node = 3,
                               .stream = 4,
                               .epoch = UINT64_C(0x0102030405060708)};
    for (int i = 0; i < 16; i++) {
        hello.link_id[i] = (uint8_t)(0x40 + i);
        hello.nonce[i] = (uint8_t)(0x80 + i);
    }
    uint8_t bytes[LINK_HELLO_BYTES];
    link_hello_pack(&hello, bytes);
    ck_assert_mem_eq(bytes, hello_bytes, sizeof bytes);
    struct link_hello back;
    ck_assert_int_eq(link_hello_unpack(bytes, &back), 0);
    ck_assert_mem_eq(&back, &hello, sizeof back);
}
END_TEST

START_TEST(other_magic_and_other_versions_are_told_apart)
{
    uint8_t bytes[LINK_HELLO_BYTES];
    struct link_hello hello;
    memcpy(bytes, hello_bytes, sizeof bytes);
    bytes[7] ^= 1;
    ck_assert_int_eq(link_hello_unpack(bytes, &hello), -EPROTO);
    memcpy(bytes, hello_bytes, sizeof bytes);
    bytes[8] = 2;
    ck_assert_int_eq(link_hello_unpack(bytes, &hello), -EPROTONOSUPPORT);
    ck_assert_uint_eq(hello.version, 2);
}
END_TEST

START_TEST(proofs_have_these_bytes)
{
    make_answer();
    ck_assert_mem_eq(answer, nonce, sizeof nonce);
    ck_assert_mem_eq(answer + LINK_NONCE_BYTES, server_proof, sizeof server_proof);
    ck_assert_mem_eq(proof, client_proof, sizeof client_proof);
}
END_TEST

START_TEST(who_knows_the_secret_passes)
{
    make_answer();
    ck_assert_int_eq(link_check_server(secret, hello_bytes, answer), 0);
    ck_assert_int_eq(link_check_client(secret, hello_bytes, answer, proof), 0);
}
END_TEST

START_TEST(any_changed_byte_is_refused)
{
    make_answer();
    uint8_t hello[LINK_HELLO_BYTES];
    for (size_t i = 0; i < sizeof answer; i++) {
        answer[i] ^= 0x10;
        ck_assert_int_eq(link_check_server(secret, hello_bytes, answer), -EACCES);
        answer[i] ^= 0x10;
    }
    for (size_t i = 0; i < sizeof proof; i++) {
        proof[i] ^= 0x10;
        ck_assert_int_eq(link_check_client(secret, hello_bytes, answer, proof), -EACCES);
        proof[i] ^= 0x10;
    }
    for (size_t i = 0; i < sizeof hello; i++) {
        memcpy(hello, hello_bytes, sizeof hello);
        hello[i] ^= 0x10;
        ck_assert_int_eq(link_check_server(secret, hello, answer), -EACCES);
        ck_assert_int_eq(link_check_client(secret, hello, answer, proof), -EACCES);
    }
    secret[31] ^= 1;
    ck_assert_int_eq(link_check_server(secret, hello_bytes, answer), -EACCES);
    ck_assert_int_eq(link_check_client(secret, hello_bytes, answer, proof), -EACCES);
}
END_TEST

START_TEST(the_servers_proof_is_not_the_clients)
{
    make_answer();
    ck_assert_int_eq(link_check_client(secret, hello_bytes, answer, answer + LINK_NONCE_BYTES),
                     -EACCES);
}
END_TEST

START_TEST(a_replayed_proof_does_not_fit_a_new_nonce)
{
    make_answer();
    uint8_t fresh[LINK_NONCE_BYTES], fresh_answer[LINK_ANSWER_BYTES];
    ck_assert_int_eq(link_random(fresh, sizeof fresh), 0);
    ck_assert_int_eq(link_server_answer(secret, hello_bytes, fresh, fresh_answer), 0);
    ck_assert_int_eq(link_check_client(secret, hello_bytes, fresh_answer, proof), -EACCES);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_hello_has_these_bytes,
        other_magic_and_other_versions_are_told_apart,
        proofs_have_these_bytes,
        who_knows_the_secret_passes,
        any_changed_byte_is_refused,
        the_servers_proof_is_not_the_clients,
        a_replayed_proof_does_not_fit_a_new_nonce,
    };
    return run_suite("link_proof", tests, sizeof tests / sizeof *tests);
}
