! Call the exported model of examples/surrogate.py:
!
!   gfortran -J run $(paceline export --show-build-flags fortran) examples/export/surrogate.f90 -o run/surrogate-call
!   run/surrogate-call run/surrogate.paceline
program surrogate
  use, intrinsic :: iso_c_binding, only: c_float, c_double
  use, intrinsic :: iso_fortran_env, only: int64
  use paceline
  implicit none

  integer, parameter :: molecules = 1000, counts = 81, properties = 9
  type(paceline_model) :: model
  real(c_float) :: x(molecules, counts), y(molecules, properties)
  real(c_float) :: x_reversed(counts, molecules), y_reversed(properties, molecules)
  real(c_double) :: error
  integer(int64) :: begin, end, rate
  character(1024) :: path
  integer :: i

  call get_command_argument(1, path)
  call model%load(path)
  call model%test(error)
  print '(a, a, a, es8.1)', "backend ", model%backend(), ", error of the test vectors ", error

  call random_number(x)
  call model%run(x, y)

  ! The same in the other order of indices: no copy is made.
  x_reversed = transpose(x)
  call model%run(x_reversed, y_reversed, order=paceline_reversed)
  print '(a, es8.1)', "difference of the two orders ", maxval(abs(y - transpose(y_reversed)))

  call system_clock(begin, rate)
  do i = 1, 100
    call model%run(x_reversed, y_reversed, order=paceline_reversed)
  end do
  call system_clock(end)
  print '(a, f8.3, a)', "time of a molecule ", 1e6 * real(end - begin) / real(rate) / 100 / molecules, " us"
end program
