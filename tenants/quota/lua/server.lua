-- Helpers for scripts of all packages: the server's clock, and numbers as text.

-- tostring() would round to 14 digits.
local function text(number)
  return string.format('%.0f', number)
end

-- The server's clock, which all gateways share; tests pass a time of their own.
local function clock_us(override)
  if override ~= '0' then
    return tonumber(override)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

