"""Which started gather a done takes: native/tables/pending_sites.h, compiled by itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

CXX = shutil.which("g++")
NATIVE = Path(__file__).parents[2] / "native"
PROGRAM = r"""
#include "tables/pending_sites.h"
#include <cassert>
#include <cstdio>
#include <thread>
using namespace dejax;
static char place[64];
int main() {
  PendingSites<int> sites;
  int got = 0;
  const auto alone = [&](int run, int site, int ticket, int gather) {
    assert(sites.Add(run, site, ChainPlace::kAlone, nullptr, place + ticket, gather) == Found::kYes);
  };
  // Two starts of one site, done in reverse order.
  alone(1, 7, 1, 100), alone(1, 7, 2, 200);
  assert(sites.Take(1, 7, place + 2, &got) == Found::kYes && got == 200);
  assert(sites.Take(1, 7, place + 1, &got) == Found::kYes && got == 100);
  assert(sites.Take(1, 7, place + 1, &got) == Found::kNone);
  // A ticket that was moved means the only start of its site; with several starts it is an error.
  alone(1, 7, 1, 100);
  assert(sites.Take(1, 7, place + 9, &got) == Found::kYes && got == 100);
  alone(1, 7, 1, 100), alone(1, 7, 2, 200);
  assert(sites.Take(1, 7, place + 9, &got) == Found::kSeveral);
  assert(sites.Take(1, 7, place + 1, &got) == Found::kYes && got == 100);
  assert(sites.Take(1, 7, place + 9, &got) == Found::kYes && got == 200);
  // Starts of other sites and of other executions are separate.
  alone(1, 7, 1, 100), alone(1, 8, 1, 300), alone(2, 7, 1, 400);
  assert(sites.Take(2, 7, place + 1, &got) == Found::kYes && got == 400);
  assert(sites.Take(1, 8, place + 1, &got) == Found::kYes && got == 300);
  assert(sites.Take(1, 7, place + 1, &got) == Found::kYes && got == 100);
  // Of two starts whose tickets have one address, the younger one is meant.
  alone(1, 7, 1, 100), alone(1, 7, 1, 200);
  assert(sites.Take(1, 7, place + 1, &got) == Found::kYes && got == 200);
  assert(sites.Take(1, 7, place + 5, &got) == Found::kYes && got == 100);
  // Two loops of one site, whose first starts both come before either loop. No ticket moves.
  for (int loop = 0; loop < 2; ++loop) {
    assert(sites.Add(1, 9, ChainPlace::kFirst, place + 20, place + 30 + loop, 1000 * loop) == Found::kYes);
  }
  for (int loop = 0; loop < 2; ++loop) {
    for (int step = 0; step < 5; ++step) {
      const void* ticket = place + 30 + loop;
      assert(sites.Add(1, 9, ChainPlace::kNext, ticket, ticket, 1000 * loop + step + 1) == Found::kYes);
      assert(sites.Take(1, 9, ticket, &got) == Found::kYes && got == 1000 * loop + step);
    }
    assert(sites.Take(1, 9, place + 30 + loop, &got) == Found::kYes && got == 1000 * loop + 5);
  }
  // One loop whose ticket moves at its border and in each step.
  assert(sites.Add(1, 9, ChainPlace::kFirst, place + 20, place + 30, 0) == Found::kYes);
  for (int step = 0; step < 5; ++step) {
    assert(sites.Add(1, 9, ChainPlace::kNext, place + 40, place + 41, step + 1) == Found::kYes);
    assert(sites.Take(1, 9, place + (step % 2 ? 41 : 42), &got) == Found::kYes && got == step);
  }
  assert(sites.Take(1, 9, place + 43, &got) == Found::kYes && got == 5);
  // Two loops whose tickets move cannot be told apart: an error, and no start is lost.
  assert(sites.Add(1, 9, ChainPlace::kFirst, place + 20, place + 30, 1) == Found::kYes);
  assert(sites.Add(1, 9, ChainPlace::kFirst, place + 20, place + 31, 2) == Found::kYes);
  assert(sites.Add(1, 9, ChainPlace::kNext, place + 40, place + 41, 3) == Found::kSeveral);
  // The starts of this thread in other executions are dropped; those of another thread are not.
  std::thread([&] { alone(5, 7, 1, 500); }).join();
  int dropped = 0, left = 0;
  sites.DropOthers(2, [&](int gather) { dropped += gather; });
  sites.ForEach([&](int gather) { left += gather; });
  assert(dropped == 3 && left == 500);
  assert(sites.Add(6, 9, ChainPlace::kNext, place, place, 1) == Found::kNone);
  std::puts("all");
}
"""


@pytest.mark.skipif(CXX is None, reason="no g++")
def test_a_done_takes_the_gather_of_its_start(tmp_path: Path) -> None:
    (tmp_path / "sites.cc").write_text(PROGRAM)
    flags = ["-std=c++17", "-Wall", "-Werror", "-fsanitize=address,undefined", "-pthread", f"-I{NATIVE}"]
    subprocess.run([CXX, *flags, str(tmp_path / "sites.cc"), "-o", str(tmp_path / "sites")], check=True)
    ran = subprocess.run([str(tmp_path / "sites")], capture_output=True, text=True)
    assert ran.stdout == "all\n", ran.stderr
