"""Aggregated records written by the KPL itself.

Origin: awslabs/kinesis-aggregation, python/test/test_deagg.py (Apache License 2.0). The sample producer of that project
wrote them to a stream with the KPL.
"""

import base64

WITH_HASH_KEYS = base64.b64decode(
    "84mawgokZmMwM2RkODgtM2U3OS00NDhhLWIwMWEtN2NmMWJkNDdiNzg0CiRjYWU0MWIxYy1lYTYxLTQzZjItOTBiZS1iODc1NWViZj"
    "g4ZTIKJGQ0OTA2OTBjLWU3NGQtNGRiMi1hM2M4LWQ4ZjJmMTg0ZmQyMwokYzkyNGJjMDktYjg1ZS00N2YxLWIzMmUtMzM2NTIyZWU1"
    "M2M4EiYzODQ4NjQ5NTg2NzUwODM5OTA3ODE1OTcyMzg0NjA1MTgwNzAyMBInMTkzNzg3NjAwMDM3NjgxNzA2OTUyMTQzMzU3MDcxOT"
    "E2MzUyNjA0EicyNjY4ODA0MzY5NjQ5MzI0MjQyNjU0NjY5MTY3MzQwNjg2ODQ0MzkSJzMzOTYwNjYwMDk0Mjk2NzM5MTg1NDYwMzU1"
    "MjQwMjAyMTg0NzI5MhomCAAQABogUkVDT1JEIDIyIHBlZW9iaGN6YnpkbXNrYm91cGd5cQoaJggBEAEaIFJFQ09SRCAyMyB1c3dreG"
    "Z0eHJvZXVzc2N4c2pobm8KGiYIAhACGiBSRUNPUkQgMjQgY2FzZWhkZ2l2ZmF4ZXVzdGx5c3p5ChomCAMQAxogUkVDT1JEIDI1IG52"
    "ZmZ2cG11b2dkb3BqaGFtZXZyawpRwVPQ3go0yp4Y6kvM0q3V"
)
WITH_HASH_KEYS_RECORDS = (
    (
        "fc03dd88-3e79-448a-b01a-7cf1bd47b784",
        "38486495867508399078159723846051807020",
        b"RECORD 22 peeobhczbzdmskboupgyq\n",
    ),
    (
        "cae41b1c-ea61-43f2-90be-b8755ebf88e2",
        "193787600037681706952143357071916352604",
        b"RECORD 23 uswkxftxroeusscxsjhno\n",
    ),
    (
        "d490690c-e74d-4db2-a3c8-d8f2f184fd23",
        "266880436964932424265466916734068684439",
        b"RECORD 24 casehdgivfaxeustlyszy\n",
    ),
    (
        "c924bc09-b85e-47f1-b32e-336522ee53c8",
        "339606600942967391854603552402021847292",
        b"RECORD 25 nvffvpmuogdopjhamevrk\n",
    ),
)

WITHOUT_HASH_KEYS = base64.b64decode(
    "84mawgokNzhmZWIxMmEtZGJhMC00NWNhLWE5MWUtYmIxZjJmMTgxOWI0CiRjMmE3NTc4Ny00NjliLTQzMTAtODQwZC1kNDg2ZGNhN2"
    "ViNWUKJDY1MGU5MzYyLTU3MmItNDQyNy1iM2ZjLTEzNTQ5ZDdlNWFlNQokMWQ4ZDk2MDAtMDBiNy00NmYzLWE5ODMtZGU4MzQ3NzU0"
    "MGMwCiRmMmU3MThhMC0zODliLTQ5NGEtYjc5Ni0zMzU1YjA3NTY5Y2MKJDk2NWI4ZGE0LWE2YmQtNDc1NS04MWM5LWU3MTgxYWI3ZG"
    "M5YQokZDY5M2M1ZjAtNTc3Mi00NmM5LThkODYtMDhjNzA1NWJkYjc1CiQ4ZDkyNDc2Yi1lYjg5LTRlODEtOTlmYi1jMmJhNjNhZDZk"
    "OTAaJAgAGiBSRUNPUkQgMTggaWtscnBzdnloeG5lcm9kZmVoZXJ1ChokCAEaIFJFQ09SRCAxOSBsbm1udWR5aHZwdmNncm9rZm16ZG"
    "gKGiQIAhogUkVDT1JEIDIwIHBqcXJjZmJ4YWZ6ZG5kem1iZ2FuZQoaJAgDGiBSRUNPUkQgMjEgYWFmcmV5cm50d3V3eGxpeWdrYmhr"
    "ChokCAQaIFJFQ09SRCAyMiBxc2FhZGhic2dtdnFnZGlmZ3V5b3UKGiQIBRogUkVDT1JEIDIzIHdqb2tvaXd2enpobGZ0bHpocWZqaw"
    "oaJAgGGiBSRUNPUkQgMjQgem9wY2FzY3J0aGJicG5qaXd1aGpiChokCAcaIFJFQ09SRCAyNSB0eGJidm5venJ3c2JveHVvbXFib3EK"
    "vV1rrLdU+Sy2v8xkgZ5YaA=="
)
WITHOUT_HASH_KEYS_RECORDS = (
    ("78feb12a-dba0-45ca-a91e-bb1f2f1819b4", None, b"RECORD 18 iklrpsvyhxnerodfeheru\n"),
    ("c2a75787-469b-4310-840d-d486dca7eb5e", None, b"RECORD 19 lnmnudyhvpvcgrokfmzdh\n"),
    ("650e9362-572b-4427-b3fc-13549d7e5ae5", None, b"RECORD 20 pjqrcfbxafzdndzmbgane\n"),
    ("1d8d9600-00b7-46f3-a983-de83477540c0", None, b"RECORD 21 aafreyrntwuwxliygkbhk\n"),
    ("f2e718a0-389b-494a-b796-3355b07569cc", None, b"RECORD 22 qsaadhbsgmvqgdifguyou\n"),
    ("965b8da4-a6bd-4755-81c9-e7181ab7dc9a", None, b"RECORD 23 wjokoiwvzzhlftlzhqfjk\n"),
    ("d693c5f0-5772-46c9-8d86-08c7055bdb75", None, b"RECORD 24 zopcascrthbbpnjiwuhjb\n"),
    ("8d92476b-eb89-4e81-99fb-c2ba63ad6d90", None, b"RECORD 25 txbbvnozrwsboxuomqboq\n"),
)

ONE_KEY = base64.b64decode(
    "84mawgoNMTU2MjYwMjA3NDg5NhInMzM5NjA2NjAwOTQyOTY3MzkxODU0NjAzNTUyNDAyMDIxODQ3MjkyGicIABAAGiFSRUNPUkQgMjAwNSB"
    "wanFyY2ZieGFmemRuZHptYmdhbmUaJwgAEAAaIVJFQ09SRCAyMDA2IHBqcXJjZmJ4YWZ6ZG5kem1iZ2FuZRonCAAQABohUkVDT1JEIDIwMD"
    "cgcGpxcmNmYnhhZnpkbmR6bWJnYW5lGicIABAAGiFSRUNPUkQgMjAwOCBwanFyY2ZieGFmemRuZHptYmdhbmUHrLqXAgpJOT8v1lp81gM/"
)
ONE_KEY_RECORDS = tuple(
    ("1562602074896", "339606600942967391854603552402021847292", b"RECORD %d pjqrcfbxafzdndzmbgane" % sample_number)
    for sample_number in (2005, 2006, 2007, 2008)
)

SAMPLES = (
    (WITH_HASH_KEYS, WITH_HASH_KEYS_RECORDS),
    (WITHOUT_HASH_KEYS, WITHOUT_HASH_KEYS_RECORDS),
    (ONE_KEY, ONE_KEY_RECORDS),
)
