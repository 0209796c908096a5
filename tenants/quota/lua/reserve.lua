-- Holds a request's amounts on every limit, or on none.
-- ARGV: now_us, epoch, spare, request id, lease_us, limits as text, its end user (or empty), the most end users, ahead
--   by meter, then for each limit: name, shape, mode, meter, exact, first, ahead, most, amount, start_us, end_us, scale,
--   rate per ms, lowest, home, ceiling per ms, model

if is_lost() then
  return {'lost'}
end
told = ARGV[3]
local request_id = ARGV[4]
local existing = find_hold(request_id)
if existing then
  return granted(existing, {})
end

local gives_way, no_place = place_for(ARGV[7], tonumber(ARGV[8]))
if no_place then
  return no_place
end

local hold = {limits = ARGV[6], ahead = by_meter(9), on = {}}
local found, over, raws, wishes, would_deny, refused = {}, {}, {}, {}, {}, false
for i = 9 + METERS, #ARGV, COLUMNS do
  local part = read_part(i)
  local wish = {first = tonumber(ARGV[i + 5]), ahead = tonumber(ARGV[i + 6]), most = tonumber(ARGV[i + 7])}
  local index = #hold.on + 1
  local counter, raw, ended = present(part, tonumber(ARGV[i + 9]), tonumber(ARGV[i + 10]))
  if not counter then
    return {'clock', now_us}
  end
  if is_short(counter, part, wish.first, wish.most) then
    if part.mode == HARD then
      refused = true
    elseif part.mode == SHADOW then
      would_deny[#would_deny + 1] = index
    end
  end
  raws[index], found[index], wishes[index], hold.on[index] = raw, counter, wish, part
  over[index] = ended
end
if refused then
  return {'denied', now_us, raws}
end

if gives_way then
  forget_user(gives_way)
end
for i, part in ipairs(hold.on) do
  if over[i] then
    keep_window(part.home, part.name, over[i])
  end
  reach(found[i], part, wishes[i].ahead, wishes[i].most)
  store(part.home, part.name, found[i])
end
hold_on_user(hold)
store_hold(request_id, hold)
redis.call('ZADD', keys.leases, text(now_us + tonumber(ARGV[5])), request_id)
return granted(hold, would_deny)
