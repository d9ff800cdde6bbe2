! Call a model that `paceline export` has written, from Fortran 2008.
!
!   use paceline
!   type(paceline_model) :: model
!   call model%load("model.paceline")
!   call model%run(x, y)               ! x(batch, 6), y(batch, 3)
!
! Order of indices. By default an array has the indices of the model in the same order: x(i, j) is
! x[i-1, j-1] in Python. Arrays of any strides are taken as they are, sections as well, and are copied
! in the other order inside of the call. With order=paceline_reversed the indices are reversed: the
! array is x(6, batch). Its memory is that of x[batch, 6] in Python, and a contiguous array is not copied.
!
! Errors. Every subroutine has an optional last argument `status`, which is PACELINE_OK or a code; the
! message is paceline_error(). Without `status`, an error stops the program with its message.
module paceline
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: error_unit
  implicit none
  private
  public :: paceline_model, paceline_error, paceline_error_name

  integer, parameter, public :: paceline_same = 0, paceline_reversed = 1
  integer(c_int), parameter, public :: PACELINE_OK = 0, PACELINE_ERROR_ARGUMENT = 1, &
    PACELINE_ERROR_SHAPE = 2, PACELINE_ERROR_DTYPE = 3, PACELINE_ERROR_BOUNDS = 4, &
    PACELINE_ERROR_NOT_FINITE = 5, PACELINE_ERROR_FILE = 6, PACELINE_ERROR_DAMAGED = 7, &
    PACELINE_ERROR_VERSION = 8, PACELINE_ERROR_PROCESSOR = 9, PACELINE_ERROR_LIBRARY = 10, &
    PACELINE_ERROR_UNSAFE = 11, PACELINE_ERROR_MEMORY = 12, PACELINE_ERROR_BACKEND = 13
  integer(c_int), parameter :: PACELINE_FLOAT32 = 1, PACELINE_FLOAT64 = 2
  integer, parameter :: MAX_RANK = 4

  type, bind(c) :: c_options
    integer(c_size_t) :: bytes
    integer(c_int) :: flags, threads
    type(c_ptr) :: library
  end type

  type, bind(c) :: c_tensor
    type(c_ptr) :: data
    integer(c_int) :: dtype, rank
    type(c_ptr) :: shape, strides
  end type

  ! An array for run_list, made by paceline_tensor(x).
  type, public :: paceline_tensor
    private
    type(c_ptr) :: data = c_null_ptr
    integer(c_int) :: dtype = 0, rank = 0
    integer(c_int64_t) :: shape(MAX_RANK) = 1, strides(MAX_RANK) = 1
  end type

  type :: paceline_model
    private
    type(c_ptr) :: handle = c_null_ptr
  contains
    procedure :: load => load_model
    procedure :: free => free_model
    procedure :: is_loaded
    procedure :: backend => backend_of
    procedure :: describe => describe_model
    procedure :: test => test_model
    procedure :: run_list
    procedure, private :: run_f32_1_1, run_f32_1_2, run_f32_1_3, run_f32_1_4, &
      run_f32_2_1, run_f32_2_2, run_f32_2_3, run_f32_2_4, &
      run_f32_3_1, run_f32_3_2, run_f32_3_3, run_f32_3_4, &
      run_f32_4_1, run_f32_4_2, run_f32_4_3, run_f32_4_4, &
      run_f64_1_1, run_f64_1_2, run_f64_1_3, run_f64_1_4, &
      run_f64_2_1, run_f64_2_2, run_f64_2_3, run_f64_2_4, &
      run_f64_3_1, run_f64_3_2, run_f64_3_3, run_f64_3_4, &
      run_f64_4_1, run_f64_4_2, run_f64_4_3, run_f64_4_4
    generic :: run => run_f32_1_1, run_f32_1_2, run_f32_1_3, run_f32_1_4, &
      run_f32_2_1, run_f32_2_2, run_f32_2_3, run_f32_2_4, &
      run_f32_3_1, run_f32_3_2, run_f32_3_3, run_f32_3_4, &
      run_f32_4_1, run_f32_4_2, run_f32_4_3, run_f32_4_4, &
      run_f64_1_1, run_f64_1_2, run_f64_1_3, run_f64_1_4, &
      run_f64_2_1, run_f64_2_2, run_f64_2_3, run_f64_2_4, &
      run_f64_3_1, run_f64_3_2, run_f64_3_3, run_f64_3_4, &
      run_f64_4_1, run_f64_4_2, run_f64_4_3, run_f64_4_4
    final :: finish_model
  end type

  interface paceline_tensor
    module procedure tensor_f32_1, tensor_f32_2, tensor_f32_3, tensor_f32_4, &
      tensor_f64_1, tensor_f64_2, tensor_f64_3, tensor_f64_4
  end interface

  interface
    function paceline_load(path, options, model) bind(c) result(code)
      import
      character(kind=c_char), intent(in) :: path(*)
      type(c_options), intent(in) :: options
      type(c_ptr), intent(out) :: model
      integer(c_int) :: code
    end function
    subroutine paceline_free(model) bind(c)
      import
      type(c_ptr), value :: model
    end subroutine
    function paceline_last_error() bind(c) result(text)
      import
      type(c_ptr) :: text
    end function
    function c_error_name(code) bind(c, name="paceline_error_name") result(text)
      import
      integer(c_int), value :: code
      type(c_ptr) :: text
    end function
    function paceline_backend(model) bind(c) result(text)
      import
      type(c_ptr), value :: model
      type(c_ptr) :: text
    end function
    function paceline_describe(model) bind(c) result(text)
      import
      type(c_ptr), value :: model
      type(c_ptr) :: text
    end function
    function paceline_test(model, error) bind(c) result(code)
      import
      type(c_ptr), value :: model
      real(c_double), intent(out) :: error
      integer(c_int) :: code
    end function
    function paceline_run(model, inputs, input_count, outputs, output_count) bind(c) result(code)
      import
      type(c_ptr), value :: model
      type(c_tensor), intent(in) :: inputs(*), outputs(*)
      integer(c_int), value :: input_count, output_count
      integer(c_int) :: code
    end function
    function strlen(text) bind(c) result(length)
      import
      type(c_ptr), value :: text
      integer(c_size_t) :: length
    end function
  end interface

contains

  ! Load a model file. check_finite: each call checks for NaN and infinity. convert: arrays of the
  ! other kind of real are converted. threads: of ONNX Runtime or libtorch, one by default. library:
  ! path of their library.
  subroutine load_model(self, path, check_finite, convert, threads, library, status)
    class(paceline_model), intent(inout) :: self
    character(*), intent(in) :: path
    logical, intent(in), optional :: check_finite, convert
    integer, intent(in), optional :: threads
    character(*), intent(in), optional :: library
    integer(c_int), intent(out), optional :: status
    character(kind=c_char), allocatable, target :: given(:)
    type(c_options) :: options
    call self%free()
    options = c_options(c_sizeof(options), 0, 0, c_null_ptr)
    if (present(check_finite)) then
      if (check_finite) options%flags = ior(options%flags, 1)
    end if
    if (present(convert)) then
      if (convert) options%flags = ior(options%flags, 2)
    end if
    if (present(threads)) options%threads = int(threads, c_int)
    if (present(library)) then
      given = c_string(library)
      options%library = c_loc(given)
    end if
    call finish(paceline_load(c_string(path), options, self%handle), status)
  end subroutine

  subroutine free_model(self)
    class(paceline_model), intent(inout) :: self
    if (c_associated(self%handle)) call paceline_free(self%handle)
    self%handle = c_null_ptr
  end subroutine

  subroutine finish_model(self)
    type(paceline_model), intent(inout) :: self
    call self%free()
  end subroutine

  logical function is_loaded(self)
    class(paceline_model), intent(in) :: self
    is_loaded = c_associated(self%handle)
  end function

  function backend_of(self) result(text)
    class(paceline_model), intent(in) :: self
    character(:), allocatable :: text
    text = f_string(paceline_backend(self%handle))
  end function

  ! The manifest as JSON: names, shapes, units, normalisation, versions.
  function describe_model(self) result(text)
    class(paceline_model), intent(in) :: self
    character(:), allocatable :: text
    text = f_string(paceline_describe(self%handle))
  end function

  ! Run the test vectors of the file. error: relative to the largest output.
  subroutine test_model(self, error, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(out) :: error
    integer(c_int), intent(out), optional :: status
    call finish(paceline_test(self%handle, error), status)
  end subroutine

  ! Message of the last error of this thread.
  function paceline_error() result(text)
    character(:), allocatable :: text
    text = f_string(paceline_last_error())
  end function

  function paceline_error_name(code) result(text)
    integer(c_int), intent(in) :: code
    character(:), allocatable :: text
    text = f_string(c_error_name(code))
  end function

  ! Several inputs and outputs: call model%run_list([paceline_tensor(a), paceline_tensor(b)],
  ! [paceline_tensor(c)]). The arrays need the attribute target.
  subroutine run_list(self, inputs, outputs, status)
    class(paceline_model), intent(in) :: self
    type(paceline_tensor), intent(in), target :: inputs(:), outputs(:)
    integer(c_int), intent(out), optional :: status
    type(c_tensor) :: in(size(inputs)), out(size(outputs))
    integer :: i
    do i = 1, size(inputs)
      in(i) = c_tensor(inputs(i)%data, inputs(i)%dtype, inputs(i)%rank, &
        c_loc(inputs(i)%shape), c_loc(inputs(i)%strides))
    end do
    do i = 1, size(outputs)
      out(i) = c_tensor(outputs(i)%data, outputs(i)%dtype, outputs(i)%rank, &
        c_loc(outputs(i)%shape), c_loc(outputs(i)%strides))
    end do
    call finish(paceline_run(self%handle, in, size(in), out, size(out)), status)
  end subroutine

  ! Store the code, or stop with the message.
  subroutine finish(code, status)
    integer(c_int), intent(in) :: code
    integer(c_int), intent(out), optional :: status
    if (present(status)) then
      status = code
    else if (code /= PACELINE_OK) then
      write (error_unit, '(a)') "paceline: " // paceline_error()
      error stop 1
    end if
  end subroutine

  function c_string(text) result(chars)
    character(*), intent(in) :: text
    character(kind=c_char) :: chars(len_trim(text) + 1)
    integer :: i
    do i = 1, len_trim(text)
      chars(i) = text(i:i)
    end do
    chars(len_trim(text) + 1) = c_null_char
  end function

  function f_string(pointer) result(text)
    type(c_ptr), intent(in) :: pointer
    character(:), allocatable :: text
    character(kind=c_char), pointer :: chars(:)
    integer :: i
    call c_f_pointer(pointer, chars, [strlen(pointer)])
    allocate (character(size(chars)) :: text)
    do i = 1, size(chars)
      text(i:i) = chars(i)
    end do
  end function

  ! Number of bytes between two elements of an array.
  pure integer(c_int64_t) function apart(first, second)
    type(c_ptr), intent(in) :: first, second
    apart = int(transfer(second, 0_c_intptr_t) - transfer(first, 0_c_intptr_t), c_int64_t)
  end function

  ! Reverse shape and strides, if asked for.
  subroutine put_order(t, order)
    type(paceline_tensor), intent(inout) :: t
    integer, intent(in), optional :: order
    integer :: n
    if (.not. present(order)) return
    if (order /= paceline_reversed) return
    n = t%rank
    t%shape(:n) = t%shape(n:1:-1)
    t%strides(:n) = t%strides(n:1:-1)
  end subroutine

  function tensor_f32_1(x, order) result(t)
    real(c_float), intent(in), target :: x(:)
    integer, intent(in), optional :: order
    type(paceline_tensor) :: t
    t%dtype = PACELINE_FLOAT32
    t%rank = 1
    t%shape(:1) = shape(x, c_int64_t)
    if (size(x) == 0) call put_order(t, order)
    if (size(x) == 0) return
    t%data = c_loc(x(1))
    if (size(x, 1) > 1) t%strides(1) = apart(t%data, c_loc(x(2))) / c_sizeof(x(1))
    call put_order(t, order)
  end function

  function tensor_f32_2(x, order) result(t)
    real(c_float), intent(in), target :: x(:, :)
    integer, intent(in), optional :: order
    type(paceline_tensor) :: t
    t%dtype = PACELINE_FLOAT32
    t%rank = 2
    t%shape(:2) = shape(x, c_int64_t)
    if (size(x) == 0) call put_order(t, order)
    if (size(x) == 0) return
    t%data = c_loc(x(1, 1))
    if (size(x, 1) > 1) t%strides(1) = apart(t%data, c_loc(x(2, 1))) / c_sizeof(x(1, 1))
    if (size(x, 2) > 1) t%strides(2) = apart(t%data, c_loc(x(1, 2))) / c_sizeof(x(1, 1))
    call put_order(t, order)
  end function

  function tensor_f32_3(x, order) result(t)
    real(c_float), intent(in), target :: x(:, :, :)
    integer, intent(in), optional :: order
    type(paceline_tensor) :: t
    t%dtype = PACELINE_FLOAT32
    t%rank = 3
    t%shape(:3) = shape(x, c_int64_t)
    if (size(x) == 0) call put_order(t, order)
    if (size(x) == 0) return
    t%data = c_loc(x(1, 1, 1))
    if (size(x, 1) > 1) t%strides(1) = apart(t%data, c_loc(x(2, 1, 1))) / c_sizeof(x(1, 1, 1))
    if (size(x, 2) > 1) t%strides(2) = apart(t%data, c_loc(x(1, 2, 1))) / c_sizeof(x(1, 1, 1))
    if (size(x, 3) > 1) t%strides(3) = apart(t%data, c_loc(x(1, 1, 2))) / c_sizeof(x(1, 1, 1))
    call put_order(t, order)
  end function

  function tensor_f32_4(x, order) result(t)
    real(c_float), intent(in), target :: x(:, :, :, :)
    integer, intent(in), optional :: order
    type(paceline_tensor) :: t
    t%dtype = PACELINE_FLOAT32
    t%rank = 4
    t%shape(:4) = shape(x, c_int64_t)
    if (size(x) == 0) call put_order(t, order)
    if (size(x) == 0) return
    t%data = c_loc(x(1, 1, 1, 1))
    if (size(x, 1) > 1) t%strides(1) = apart(t%data, c_loc(x(2, 1, 1, 1))) / c_sizeof(x(1, 1, 1, 1))
    if (size(x, 2) > 1) t%strides(2) = apart(t%data, c_loc(x(1, 2, 1, 1))) / c_sizeof(x(1, 1, 1, 1))
    if (size(x, 3) > 1) t%strides(3) = apart(t%data, c_loc(x(1, 1, 2, 1))) / c_sizeof(x(1, 1, 1, 1))
    if (size(x, 4) > 1) t%strides(4) = apart(t%data, c_loc(x(1, 1, 1, 2))) / c_sizeof(x(1, 1, 1, 1))
    call put_order(t, order)
  end function

  function tensor_f64_1(x, order) result(t)
    real(c_double), intent(in), target :: x(:)
    integer, intent(in), optional :: order
    type(paceline_tensor) :: t
    t%dtype = PACELINE_FLOAT64
    t%rank = 1
    t%shape(:1) = shape(x, c_int64_t)
    if (size(x) == 0) call put_order(t, order)
    if (size(x) == 0) return
    t%data = c_loc(x(1))
    if (size(x, 1) > 1) t%strides(1) = apart(t%data, c_loc(x(2))) / c_sizeof(x(1))
    call put_order(t, order)
  end function

  function tensor_f64_2(x, order) result(t)
    real(c_double), intent(in), target :: x(:, :)
    integer, intent(in), optional :: order
    type(paceline_tensor) :: t
    t%dtype = PACELINE_FLOAT64
    t%rank = 2
    t%shape(:2) = shape(x, c_int64_t)
    if (size(x) == 0) call put_order(t, order)
    if (size(x) == 0) return
    t%data = c_loc(x(1, 1))
    if (size(x, 1) > 1) t%strides(1) = apart(t%data, c_loc(x(2, 1))) / c_sizeof(x(1, 1))
    if (size(x, 2) > 1) t%strides(2) = apart(t%data, c_loc(x(1, 2))) / c_sizeof(x(1, 1))
    call put_order(t, order)
  end function

  function tensor_f64_3(x, order) result(t)
    real(c_double), intent(in), target :: x(:, :, :)
    integer, intent(in), optional :: order
    type(paceline_tensor) :: t
    t%dtype = PACELINE_FLOAT64
    t%rank = 3
    t%shape(:3) = shape(x, c_int64_t)
    if (size(x) == 0) call put_order(t, order)
    if (size(x) == 0) return
    t%data = c_loc(x(1, 1, 1))
    if (size(x, 1) > 1) t%strides(1) = apart(t%data, c_loc(x(2, 1, 1))) / c_sizeof(x(1, 1, 1))
    if (size(x, 2) > 1) t%strides(2) = apart(t%data, c_loc(x(1, 2, 1))) / c_sizeof(x(1, 1, 1))
    if (size(x, 3) > 1) t%strides(3) = apart(t%data, c_loc(x(1, 1, 2))) / c_sizeof(x(1, 1, 1))
    call put_order(t, order)
  end function

  function tensor_f64_4(x, order) result(t)
    real(c_double), intent(in), target :: x(:, :, :, :)
    integer, intent(in), optional :: order
    type(paceline_tensor) :: t
    t%dtype = PACELINE_FLOAT64
    t%rank = 4
    t%shape(:4) = shape(x, c_int64_t)
    if (size(x) == 0) call put_order(t, order)
    if (size(x) == 0) return
    t%data = c_loc(x(1, 1, 1, 1))
    if (size(x, 1) > 1) t%strides(1) = apart(t%data, c_loc(x(2, 1, 1, 1))) / c_sizeof(x(1, 1, 1, 1))
    if (size(x, 2) > 1) t%strides(2) = apart(t%data, c_loc(x(1, 2, 1, 1))) / c_sizeof(x(1, 1, 1, 1))
    if (size(x, 3) > 1) t%strides(3) = apart(t%data, c_loc(x(1, 1, 2, 1))) / c_sizeof(x(1, 1, 1, 1))
    if (size(x, 4) > 1) t%strides(4) = apart(t%data, c_loc(x(1, 1, 1, 2))) / c_sizeof(x(1, 1, 1, 1))
    call put_order(t, order)
  end function

  subroutine run_f32_1_1(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:)
    real(c_float), intent(inout), target :: y(:)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_1_2(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:)
    real(c_float), intent(inout), target :: y(:, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_1_3(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:)
    real(c_float), intent(inout), target :: y(:, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_1_4(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:)
    real(c_float), intent(inout), target :: y(:, :, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_2_1(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :)
    real(c_float), intent(inout), target :: y(:)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_2_2(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :)
    real(c_float), intent(inout), target :: y(:, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_2_3(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :)
    real(c_float), intent(inout), target :: y(:, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_2_4(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :)
    real(c_float), intent(inout), target :: y(:, :, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_3_1(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :, :)
    real(c_float), intent(inout), target :: y(:)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_3_2(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :, :)
    real(c_float), intent(inout), target :: y(:, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_3_3(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :, :)
    real(c_float), intent(inout), target :: y(:, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_3_4(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :, :)
    real(c_float), intent(inout), target :: y(:, :, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_4_1(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :, :, :)
    real(c_float), intent(inout), target :: y(:)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_4_2(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :, :, :)
    real(c_float), intent(inout), target :: y(:, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_4_3(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :, :, :)
    real(c_float), intent(inout), target :: y(:, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f32_4_4(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_float), intent(in), target :: x(:, :, :, :)
    real(c_float), intent(inout), target :: y(:, :, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_1_1(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:)
    real(c_double), intent(inout), target :: y(:)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_1_2(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:)
    real(c_double), intent(inout), target :: y(:, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_1_3(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:)
    real(c_double), intent(inout), target :: y(:, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_1_4(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:)
    real(c_double), intent(inout), target :: y(:, :, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_2_1(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :)
    real(c_double), intent(inout), target :: y(:)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_2_2(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :)
    real(c_double), intent(inout), target :: y(:, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_2_3(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :)
    real(c_double), intent(inout), target :: y(:, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_2_4(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :)
    real(c_double), intent(inout), target :: y(:, :, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_3_1(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :, :)
    real(c_double), intent(inout), target :: y(:)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_3_2(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :, :)
    real(c_double), intent(inout), target :: y(:, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_3_3(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :, :)
    real(c_double), intent(inout), target :: y(:, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_3_4(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :, :)
    real(c_double), intent(inout), target :: y(:, :, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_4_1(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :, :, :)
    real(c_double), intent(inout), target :: y(:)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_4_2(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :, :, :)
    real(c_double), intent(inout), target :: y(:, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_4_3(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :, :, :)
    real(c_double), intent(inout), target :: y(:, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

  subroutine run_f64_4_4(self, x, y, order, status)
    class(paceline_model), intent(in) :: self
    real(c_double), intent(in), target :: x(:, :, :, :)
    real(c_double), intent(inout), target :: y(:, :, :, :)
    integer, intent(in), optional :: order
    integer(c_int), intent(out), optional :: status
    call self%run_list([paceline_tensor(x, order)], [paceline_tensor(y, order)], status)
  end subroutine

end module
