// Signals of Python during long calls.
#pragma once
#include <nanobind/nanobind.h>

#include <exception>
#include <stdexcept>

namespace intflash {

// The identity of Python's main thread, which alone handles signals.
inline unsigned long main_thread = 0;

// Runs Python's signal handlers during a long call; returns what one of them has raised, as KeyboardInterrupt for
// Ctrl-C.
inline std::exception_ptr check_signals() {
  if (PyThread_get_thread_ident() != main_thread) return nullptr;
  const nanobind::gil_scoped_acquire in_register;
  if (PyErr_CheckSignals() == 0) return nullptr;
  try {
    nanobind::raise_python_error();
  } catch (...) {
    return std::current_exception();
  }
}

// Marks a call of this thread as running. A signal handler must not begin another one, since the thread's scratch is in
// use.
class RunningCall {
 public:
  RunningCall() {
    if (is_running)
      throw std::runtime_error("intflash was called by a signal handler that runs during another call of intflash");
    is_running = true;
  }
  ~RunningCall() { is_running = false; }

 private:
  static inline thread_local bool is_running = false;
};

}  // namespace intflash
