# find_package(paceline CONFIG REQUIRED)
#   target_link_libraries(solver PRIVATE paceline::paceline)           C and C++
#   target_link_libraries(solver PRIVATE paceline::paceline_fortran)   Fortran: compiles the module
get_filename_component(_paceline "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT EXISTS "${_paceline}/lib/libpaceline.so")
  set(paceline_FOUND FALSE)
  set(paceline_NOT_FOUND_MESSAGE "${_paceline}/lib/libpaceline.so does not exist. HINT: ${_paceline}/build.sh")
  return()
endif()
if(NOT TARGET paceline::paceline)
  add_library(paceline::paceline SHARED IMPORTED)
  set_target_properties(paceline::paceline PROPERTIES
    IMPORTED_LOCATION "${_paceline}/lib/libpaceline.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_paceline}/include")
  get_property(_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if("Fortran" IN_LIST _languages)
    add_library(paceline_fortran STATIC "${_paceline}/fortran/paceline.f90")
    set_target_properties(paceline_fortran PROPERTIES
      Fortran_MODULE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/paceline_modules")
    target_include_directories(paceline_fortran PUBLIC "${CMAKE_CURRENT_BINARY_DIR}/paceline_modules")
    target_link_libraries(paceline_fortran PUBLIC paceline::paceline)
    add_library(paceline::paceline_fortran ALIAS paceline_fortran)
  endif()
endif()
