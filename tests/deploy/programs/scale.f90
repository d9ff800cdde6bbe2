! The model computes y(i, j) = 10 j + sum over k of k x(i, k): of float64[batch,3] to [batch,2].
program scale
  use, intrinsic :: iso_c_binding
  use paceline
  implicit none
  type(paceline_model) :: model
  real(c_double) :: x(5, 3), y(5, 2), field(2, 9, 3), expected(5, 2), wrong(5, 4), error, one(3), r(3, 5), s(2, 5)
  real(c_double) :: no_cells(3, 0), no_results(2, 0), none(0, 3), no_y(0, 2)
  real(c_float) :: single(5, 3), result(5, 2)
  integer(c_int) :: status
  integer :: i, j
  character(1024) :: path

  call get_command_argument(1, path)
  call model%load(path)
  call model%test(error)
  if (error > 1e-13) error stop "test vectors"
  do i = 1, 5
    x(i, :) = [0.5d0 * i, -1d0 * i, 2d0]
    do j = 1, 2
      expected(i, j) = 10 * j + sum([1d0, 2d0, 3d0] * x(i, :))
    end do
  end do
  call model%run(x, y)
  if (any(abs(y - expected) > 1e-13)) error stop "same order"
  r = transpose(x)
  call model%run(r, s, order=paceline_reversed)
  if (any(abs(transpose(s) - expected) > 1e-13)) error stop "reversed order"
  ! A section with strides, and one that runs backwards.
  field = 99
  field(2, 1:9:2, :) = x
  call model%run(field(2, 1:9:2, :), y)
  if (any(abs(y - expected) > 1e-13)) error stop "section"
  call model%run(x(5:1:-1, :), y(5:1:-1, :))
  if (any(abs(y - expected) > 1e-13)) error stop "backwards"
  ! A rank without cells.
  call model%run(no_cells, no_results, order=paceline_reversed)
  call model%run(none, no_y)
  wrong = 0
  call model%run(wrong, y, status=status)
  if (status /= PACELINE_ERROR_SHAPE) error stop "shape"
  if (index(paceline_error(), "[5, 4]") == 0) error stop "message"
  single = 0
  call model%run(single, result, status=status)
  if (status /= PACELINE_ERROR_DTYPE) error stop "dtype"
  one = 0
  call model%run(one, y, status=status)
  if (status /= PACELINE_ERROR_SHAPE) error stop "rank"
  call model%load(trim(path) // ".absent", status=status)
  if (status /= PACELINE_ERROR_FILE) error stop "absent file"
  if (model%is_loaded()) error stop "loaded"
  print '(a)', "right"
end program
