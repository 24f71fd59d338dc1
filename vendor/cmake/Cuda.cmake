# The CUDA build: which toolkit, and what our library links of it.

# vendor/cuda.py knows what a toolkit needs; without it a failure, deep in a build, names neither the reason nor a remedy.
function(choose_cuda_toolkit)
    find_package(Python 3.9 REQUIRED COMPONENTS Interpreter)
    set(_archs "${CMAKE_CUDA_ARCHITECTURES}")
    if(NOT _archs)
        set(_archs "$ENV{CUDAARCHS}")
    endif()
    set(_host "${CMAKE_CUDA_HOST_COMPILER}")
    if(NOT _host)
        set(_host "$ENV{CUDAHOSTCXX}")
    endif()
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/vendor/cuda.py" --cmake
            "--arch=${_archs}" "--nvcc=${CMAKE_CUDA_COMPILER}" "--host=${_host}"
        OUTPUT_VARIABLE _text ERROR_VARIABLE _message RESULT_VARIABLE _failed)
    if(_failed)
        if(CMAKE_CUDA_COMPILER AND CMAKE_CUDA_COMPILER STREQUAL "${PYLLAMA_DFLASH_CUDA_CHOSEN}")
            # Its libraries are in the cache as well, so no other toolkit can be taken in the same folder.
            string(APPEND _message "or, since that compiler was chosen for another architecture: delete ${CMAKE_BINARY_DIR}, "
                "and configure again")
        endif()
        message(FATAL_ERROR "${_message}")
    endif()
    foreach(_name nvcc version host path)
        string(REGEX MATCH "(^|\n)${_name}=([^\n]*)" _line "${_text}")
        set(_${_name} "${CMAKE_MATCH_2}")
    endforeach()
    message(STATUS "CUDA ${_version}: ${_nvcc} ${_host}")

    if(NOT CMAKE_CUDA_COMPILER)
        set(PYLLAMA_DFLASH_CUDA_CHOSEN "${_nvcc}" CACHE INTERNAL "the CUDA compiler that nobody named")
    endif()
    set(CMAKE_CUDA_COMPILER "${_nvcc}" CACHE FILEPATH "CUDA compiler" FORCE)
    if(_host)
        set(CMAKE_CUDA_HOST_COMPILER "${_host}" CACHE FILEPATH "host compiler of the CUDA compiler" FORCE)
    endif()
    # CMake looks for the toolkit's folders by the first nvcc on PATH.
    get_filename_component(_folder "${_nvcc}" DIRECTORY)
    set(ENV{PATH} "${_folder}:$ENV{PATH}")
    if(_path)
        set(ENV{PATH} "${_path}:$ENV{PATH}")
        set(PYLLAMA_DFLASH_CUDA_PATH "${_path}" PARENT_SCOPE)
    endif()
    set(PYLLAMA_DFLASH_CUDA_VERSION "${_version}" PARENT_SCOPE)
endfunction()

# Upstream links the shared runtime and cuBLAS; ours must load where only a driver is installed, or not even that.
function(link_cuda_lightly _target)
    foreach(_property LINK_LIBRARIES INTERFACE_LINK_LIBRARIES)
        get_target_property(_libraries ${_target} ${_property})
        string(REPLACE "CUDA::cudart" "CUDA::cudart_static" _libraries "${_libraries}")
        string(REPLACE "cudart_static_static" "cudart_static" _libraries "${_libraries}")
        string(REGEX REPLACE "CUDA::cublas(Lt)?(_static)?" "" _libraries "${_libraries}")
        string(REPLACE "$<LINK_ONLY:>" "" _libraries "${_libraries}")
        set_target_properties(${_target} PROPERTIES ${_property} "${_libraries}")
    endforeach()
    set(_ours "${CMAKE_CURRENT_SOURCE_DIR}/pyllama_dflash/native/cuda")
    target_sources(${_target} PRIVATE "${_ours}/cublas.cpp" "${_ours}/products.cu" "${_ours}/launches.cpp")
endfunction()

# Launches are counted in native/cuda/launches.cpp on their way to the runtime.
function(count_cuda_launches _target)
    target_compile_definitions(${_target} PRIVATE PLD_CUDA)
    foreach(_name cudaLaunchKernel cudaLaunchKernelExC cudaGraphLaunch __cudaRegisterFunction __cudaLaunchKernel __cudaGetKernel)
        target_link_options(${_target} PRIVATE "LINKER:--wrap=${_name}")
    endforeach()
endfunction()
