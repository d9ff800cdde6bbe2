! Heat in a column of moist soil, with a learned conductivity: Fortran 2008 and MPI.
!
!   mpirun -n 2 run/heat run/conductivity.paceline 10000
!
! c dT/dt = d/dx (k(T, w) dT/dx). One end is heated and the other one is cooled by the same flux, so the
! heat of the column is constant. A second column is computed with the formula of k, for comparison.
program heat
  use, intrinsic :: iso_fortran_env, only: real64
  use mpi_f08
  use paceline
  implicit none

  integer, parameter :: cells = 128 ! of all ranks
  real(real64), parameter :: dx = 1d0 / cells, dt = 30, capacity = 2d6, end_flux = 30 ! m, s, J/(m3 K), W/m2
  type(paceline_model) :: conductivity
  real(real64), allocatable :: learned(:), exact(:) ! K; cell n + 1 is the first one of the right neighbour
  real(real64), allocatable :: faces(:, :), k(:, :), flux(:)
  real(real64) :: heat_at_start, seconds(2) = 0
  integer :: rank, ranks, left, right, n, i, step, steps, every
  character(1024) :: word

  call MPI_Init()
  call MPI_Comm_rank(MPI_COMM_WORLD, rank)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks)
  if (command_argument_count() < 1) error stop "usage: heat MODEL [STEPS]"
  if (mod(cells, ranks) /= 0) error stop "the number of ranks must divide 128"
  n = cells / ranks
  left = merge(MPI_PROC_NULL, rank - 1, rank == 0)
  right = merge(MPI_PROC_NULL, rank + 1, rank == ranks - 1)

  call get_command_argument(1, word)
  call conductivity%load(word) ! an error stops the program with its message
  call get_command_argument(2, word)
  steps = 10000
  if (word /= "") read (word, *) steps
  every = max(1, steps / 50)

  allocate (learned(n + 1), exact(n + 1), faces(2, n), k(1, n), flux(0:n))
  learned = 300
  exact = 300
  faces(2, :) = [(0.2 + 0.7 * dx * (rank * n + i), i=1, n)] ! saturation at the right face of each cell
  heat_at_start = total(exact)
  if (rank == 0) print '(a)', "step,heat_learned,heat_exact,largest_difference_K"
  do step = 1, steps
    call advance(learned, .true.)
    call advance(exact, .false.)
    if (mod(step, every) == 0) call report
  end do
  if (rank == 0) print '(a, 2f8.2, a)', "# time of a step, learned and exact:", 1e6 * seconds / steps, " us"
  call MPI_Finalize()

contains

  subroutine advance(t, with_model)
    real(real64), intent(inout) :: t(:)
    logical, intent(in) :: with_model
    seconds(merge(1, 2, with_model)) = seconds(merge(1, 2, with_model)) - MPI_Wtime()
    call MPI_Sendrecv(t(1), 1, MPI_DOUBLE_PRECISION, left, 0, t(n + 1), 1, MPI_DOUBLE_PRECISION, right, 0, &
      MPI_COMM_WORLD, MPI_STATUS_IGNORE)
    faces(1, :) = (t(:n) + t(2:)) / 2
    if (with_model) then ! faces(2, batch) is faces[batch, 2] of the model: nothing is copied
      call conductivity%run(faces, k, order=paceline_reversed)
    else
      k(1, :) = formula(faces(1, :), faces(2, :))
    end if
    ! One rank computes each flux, and its neighbour gets it: heat is then conserved with any k.
    flux(1:) = -k(1, :) * (t(2:) - t(:n)) / dx
    if (rank == 0) flux(0) = end_flux
    if (rank == ranks - 1) flux(n) = end_flux
    call MPI_Sendrecv(flux(n), 1, MPI_DOUBLE_PRECISION, right, 1, flux(0), 1, MPI_DOUBLE_PRECISION, left, 1, &
      MPI_COMM_WORLD, MPI_STATUS_IGNORE)
    t(:n) = t(:n) - dt / (capacity * dx) * (flux(1:) - flux(:n - 1))
    seconds(merge(1, 2, with_model)) = seconds(merge(1, 2, with_model)) + MPI_Wtime()
  end subroutine

  ! Same as in closures.py.
  elemental real(real64) function formula(temperature, saturation)
    real(real64), intent(in) :: temperature, saturation
    formula = 0.25d0 + 1.5d0 * exp(0.27d0 * (1 - saturation**(-1.06d0))) &
      + 0.5d0 * saturation * (1 - saturation) * exp(0.05d0 * (temperature - 300))
  end function

  real(real64) function total(t)
    real(real64), intent(in) :: t(:)
    call MPI_Allreduce(sum(t(:n)), total, 1, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD)
  end function

  ! Print the relative change of the heat of both columns, and the difference between them.
  subroutine report
    real(real64) :: difference, changes(2)
    call MPI_Allreduce(maxval(abs(learned(:n) - exact(:n))), difference, 1, MPI_DOUBLE_PRECISION, MPI_MAX, &
      MPI_COMM_WORLD)
    changes = [total(learned), total(exact)] / heat_at_start - 1
    if (rank == 0) print '(i0, 3(",", es22.14))', step, changes, difference
  end subroutine
end program
