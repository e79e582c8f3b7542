from kernels.cpu.build import BuildError

raise BuildError("no C++ compiler found; install g++ or set CXX")
