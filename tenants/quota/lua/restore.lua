-- Holds again what an open request held, whether there is room or not.
-- ARGV: now_us, number of the attempt, request id, lease_us, limits as text, ahead by meter, then for each limit
--   what `read_part` reads, with what is held, charged and promised in the place of what is asked for, and the
--   bounds of the window that is charged

if not may_rebuild(tonumber(ARGV[2])) then
  return {'lost'}
end
local request_id = ARGV[3]
if find_hold(request_id) then
  return {'restored', now_us}
end
local hold = {limits = ARGV[5], ahead = by_meter(6), on = {}}
for i = 6 + METERS, #ARGV, COLUMNS do
  local part = read_part(i)
  part.start = tonumber(ARGV[i + 9])
  local counter, name = locate(part)
  if not counter then
    local end_us = tonumber(ARGV[i + 10])
    local is_current = end_us == 0 or (now_us >= part.start and now_us < end_us)
    if part.shape == 'c' then
      counter = {0}
    elseif is_current then
      local over = load(part.home, part.name)
      if over then
        keep_window(part.home, part.name, over)
      end
      counter, name = {part.start, end_us, 0, 0, 0}, part.name
    else
      -- An ended window is taken as used up, as what is left is unknown.
      counter = {part.start, end_us, part.amount, 0, 0}
    end
  end
  change(counter, part, tonumber(ARGV[i + 5]), tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7]))
  store_located(part, name, counter)
  hold.on[#hold.on + 1] = part
end
hold_on_user(hold)
store_hold(request_id, hold)
redis.call('ZADD', keys.leases, text(now_us + tonumber(ARGV[4])), request_id)
return {'restored', now_us}
